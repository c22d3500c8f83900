// Numbers as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(2)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Math.round(value).toLocaleString("en");
}

/** So many of what `noun` names. */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A speed: whole from 100 on, else with a digit. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? count(value) : value.toFixed(value && value < 10 ? 1 : 0);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = share * 100;
  return `${value && value < 10 ? value.toFixed(1) : value.toFixed(0)} %`;
}

export function bytes(value) {
  let unit = 0;
  let shown = value;
  while (shown >= 1024 && unit < UNITS.length - 1) {
    shown /= 1024;
    unit += 1;
  }
  return `${unit && shown < 100 ? shown.toFixed(shown < 10 ? 2 : 1) : shown.toFixed(0)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

export function duration(value) {
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** The value under which a share of what a histogram counted lies; null if it counted nothing. */
export function quantile(bounds, counts, share) {
  const total = counts.reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  let below = 0;
  for (let at = 0; at < bounds.length; at += 1) {
    if (below + counts[at] >= share * total) {
      const low = at ? bounds[at - 1] : 0;
      return low + ((bounds[at] - low) * (share * total - below)) / (counts[at] || 1);
    }
    below += counts[at];
  }
  return bounds.at(-1);
}
