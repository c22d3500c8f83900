"""Throughput of the offline ``LLM``.

    python bench/offline.py MODEL [--prompts 64] [--input-tokens 128] [--output-tokens 128]
                            [--dtype auto] [--max-num-seqs N] [--max-num-batched-tokens N]

Random token ids as prompts, EOS ignored, greedy, all submitted at once after one warm-up prompt.
Prints a line and, as the last line, one JSON document.
"""

import argparse
import json
import random
import time

from zlm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=40000, help="prompt ids are 100..vocab-1")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [
        [rng.randrange(100, options.vocab) for _ in range(options.input_tokens)]
        for _ in range(options.prompts)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    start = time.perf_counter()
    with LLM(
        options.model,
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    ) as llm:
        ready = time.perf_counter() - start
        llm.generate([[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, greedy)
        seconds = time.perf_counter() - start
    produced = sum(len(output.outputs[0].token_ids) for output in outputs)
    result = {
        "bench": "offline",
        "model": options.model,
        "prompts": options.prompts,
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "ready_s": round(ready, 2),
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(produced / seconds, 1),
        "total_tokens_per_s": round(
            (produced + options.prompts * options.input_tokens) / seconds, 1
        ),
    }
    print(f"ready in {result['ready_s']} s; {result['output_tokens_per_s']} output tokens/s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
