#!/usr/bin/env bash
# Boots a systemd of its own in namespaces of its own, with this machine's files under a layer that
# is thrown away, and runs a program in it as a service. Needs root. Nothing outside changes: the
# file system is an overlay, the network is a loopback interface, /proc/sys is read-only.
#   systemd_machine.sh FOLDER PROGRAM...
# FOLDER is copied over the machine's files before it boots; $MACHINE_BINDS, SOURCE:TARGET separated
# by spaces, are seen there too, read-only. The program's output is printed; the exit status is its
# own. It has $MACHINE_SECONDS to end.
set -euo pipefail

if [ -z "${IN_MACHINE:-}" ]; then
    exec env IN_MACHINE=1 unshare --mount "$0" "$@"
fi
folder=$1
shift
work=$(mktemp -d)
group=/sys/fs/cgroup/zlm-test-$$
[ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ] || group=/sys/fs/cgroup/unified/zlm-test-$$
home=$(dirname "$group")

leave() { # shellcheck disable=SC2329
    if [ -d "$group" ]; then
        echo $$ >"$home/cgroup.procs"
        find "$group" -depth -type d -exec rmdir {} \;
    fi
    ! mountpoint -q "$work" || umount -l "$work"
    rmdir "$work"
}

trap leave EXIT
mount --make-rprivate /
mount -t tmpfs -o size=4g tmpfs "$work"
mkdir "$work"/{lower,upper,work,root}
mount --bind / "$work/lower"
layers=lowerdir=$work/lower,upperdir=$work/upper,workdir=$work/work
mount -t overlay -o "$layers" overlay "$work/root"
root=$work/root
mkdir "$group"
echo $$ >"$group/cgroup.procs"

# What boots: nothing of this machine's own but the journal, D-Bus and temporary files.
rm -f "$root"/etc/systemd/system/*.wants/*
for unit in systemd-{sysctl,modules-load,logind,udevd,networkd,resolved,timesyncd}.service \
    {console-getty,e2scrub_reap}.service systemd-udevd-{control,kernel}.socket; do
    ln -sf /dev/null "$root/etc/systemd/system/$unit"
done
tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
cp -a "$folder/." "$root/"
chmod 755 "$root"
for bind in ${MACHINE_BINDS:-}; do
    mkdir -p "$root${bind#*:}"
    mount --bind "${bind%%:*}" "$root${bind#*:}"
    mount -o remount,bind,ro "$root${bind#*:}"
done
printf '%q ' "$@" >"$root/program"
cat >"$root/etc/systemd/system/program.service" <<UNIT
[Unit]
After=dbus.service systemd-journald.service
[Service]
Type=oneshot
ExecStart=-/bin/bash -c '. /program; echo \$? >/status'
ExecStopPost=/bin/systemctl --no-block exit
StandardOutput=append:/output
StandardError=append:/output
UNIT

timeout -k 5 "${MACHINE_SECONDS:-300}" unshare --pid --fork --kill-child --mount --uts --ipc \
    --cgroup --net bash -euc '
    root=$1
    ip link set lo up
    mount -t proc proc "$root/proc"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,bind,ro "$root/proc/sys"
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for node in null zero full random urandom tty; do
        touch "$root/dev/$node"
        mount --bind "/dev/$node" "$root/dev/$node"
    done
    mkdir "$root"/dev/{shm,old}
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    ln -s /proc/self/fd "$root/dev/fd"
    mount -t tmpfs -o mode=755 tmpfs "$root/run"
    mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
    cd "$root"
    pivot_root . dev/old
    umount -l /dev/old
    exec env -i container=zlm-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --unit=program.service --show-status=0 --log-target=journal
' bash "$root" </dev/null >"$work/systemd.log" 2>&1 || true
cat "$root/output" 2>/dev/null || cat "$work/systemd.log"
[ -e "$root/status" ] || { echo "the program did not end" >&2; exit 1; }
exit "$(cat "$root/status")"
