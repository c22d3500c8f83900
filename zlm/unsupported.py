"""Flags that ``vllm serve`` has and zlm does not, each with a word on why or on what to do instead.

Only names: a guide, unit file or program written for vLLM is answered with more than "unknown
flag". The names are those of its releases up to 0.33, old spellings too; keywords of its ``LLM``
are the same words.
"""

LATER = {
    "plugins come with a later version": (
        "tool-parser-plugin tool-server logits-processor-pattern logits-processors"
    ),
    "adapters come with a later version": (
        "enable-lora enable-lora-bias lora-modules max-loras max-lora-rank lora-extra-vocab-size "
        "lora-dtype max-cpu-loras fully-sharded-loras default-mm-loras lora-target-modules "
        "long-lora-scaling-factors enable-prompt-adapter prompt-adapters max-prompt-adapters "
        "max-prompt-adapter-token"
    ),
    "speculative decoding comes with a later version": (
        "speculative-config speculative-model num-speculative-tokens num-lookahead-slots "
        "speculative-draft-tensor-parallel-size speculative-max-model-len "
        "speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min "
        "spec-decoding-acceptance-method speculative-model-quantization "
        "speculative-disable-mqa-scorer typical-acceptance-sampler-posterior-alpha "
        "typical-acceptance-sampler-posterior-threshold disable-logprobs-during-spec-decoding"
    ),
}

EXPERTS = "--tensor-parallel-size gives each GPU a part of every expert, so all have as much to do"
NODES = "several machines are for `zlm serve`"  # keywords that it has as flags, and LLM has not

INSTEAD = {
    "nothing is compiled by tracing, and CUDA graphs have sizes of their own (or none: "
    "--enforce-eager)": (
        "compilation-config optimization-level cudagraph-capture-sizes cuda-graph-sizes "
        "max-cudagraph-capture-size max-seq-len-to-capture max-context-len-to-capture "
        "cudagraph-metrics enable-layerwise-nvtx-tracing"
    ),
    "attention has one switch here: --attention-backend auto, triton or sdpa": (
        "attention-config use-trtllm-attention disable-cascade-attn override-attention-dtype"
    ),
    "kernels are chosen by the card and the shapes": "kernel-config",
    "grammars have one backend here, and requests say the rest in structured_outputs": (
        "guided-decoding-backend structured-outputs-config guided-decoding-disable-fallback "
        "guided-decoding-disable-any-whitespace guided-decoding-disable-additional-properties"
    ),
    "steps always run ahead: --run-ahead-steps": (
        "async-scheduling num-scheduler-steps multi-step-stream-outputs"
    ),
    "zlm runs one engine, on one machine or several (--nnodes): run one server a replica": (
        "data-parallel-size data-parallel-rank data-parallel-start-rank data-parallel-size-local "
        "data-parallel-address data-parallel-rpc-port data-parallel-backend "
        "data-parallel-hybrid-lb data-parallel-external-lb worker-use-ray engine-use-ray "
        "ray-workers-use-nsight max-parallel-loading-workers enable-dbo ubatch-size "
        "dbo-decode-token-threshold dbo-prefill-token-threshold disable-custom-all-reduce "
        "decode-context-parallel-size prefill-context-parallel-size dcp-kv-cache-interleave-size "
        "cp-kv-cache-interleave-size dcp-comm-backend worker-cls worker-extension-cls "
        "disable-nccl-for-dp-synchronization"
    ),
    EXPERTS: (
        "enable-expert-parallel all2all-backend enable-eplb eplb-config expert-placement-strategy "
        "num-redundant-experts eplb-window-size eplb-step-interval eplb-log-balancedness"
    ),
    "the KV cache stays in memory of the device": (
        "cpu-offload-gb cpu-offload-params kv-offloading-size kv-offloading-backend "
        "kv-transfer-config kv-events-config ec-transfer-config kv-cache-memory "
        "kv-sharing-fast-prefill calculate-kv-scales quantization-param-path "
        "kv-cache-dtype-skip-layers preemption-mode use-v2-block-manager "
        "disable-hybrid-kv-cache-manager offload-group-size offload-num-in-group "
        "offload-prefetch-step offload-params offload-backend"
    ),
    "zlm has one hash of blocks, made for it": "prefix-caching-hash-algo",
    "models with a recurrent state are not supported": (
        "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-cache-mode"
    ),
    "models see text only": (
        "limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs "
        "mm-processor-cache-gb mm-processor-cache-type mm-shm-cache-max-object-size-mb "
        "mm-encoder-only mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-attn-dtype "
        "interleave-mm-strings skip-mm-profiling video-pruning-rate language-model-only "
        "disable-mm-preprocessor-cache disable-chunked-mm-input allowed-local-media-path "
        "allowed-media-domains image-input-type image-token-id image-input-shape "
        "image-feature-size mm-tensor-ipc max-audio-clip-filesize-mb"
    ),
    "what a checkpoint says is taken as it is: edit its config.json": (
        "hf-overrides hf-config-path rope-scaling rope-theta override-neuron-config config-format "
        "disable-sliding-window"
    ),
    "put a generation_config.json into a folder and give --generation-config FOLDER": (
        "override-generation-config"
    ),
    "put a token in the environment: HF_TOKEN": "hf-token",
    "a model's own code is never run": "code-revision model-impl io-processor-plugin",
    "zlm has one kind of tokenizer, the tokenizers library": "tokenizer-mode",
    "--revision is the tokenizer's too": "tokenizer-revision",
    "weights are read one way, as fast as the disk gives them": (
        "model-loader-extra-config safetensors-load-strategy ignore-patterns use-tqdm-on-load "
        "pt-load-map-location allow-deprecated-quantization model-weights"
    ),
    "log-probabilities are always of the raw distribution": "logprobs-mode",
    "prompts are text or token ids": "enable-prompt-embeds",
    "the scheduler has one token budget a step: --max-num-batched-tokens": (
        "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold "
        "scheduler-delay-factor scheduler-cls stream-interval "
        "scheduler-reserve-full-isl"
    ),
    "set the log's level in the environment: ZLM_LOG=debug, info, warning or error": (
        "uvicorn-log-level log-config-file max-log-len "
        "disable-uvicorn-access-log disable-access-log-for-endpoints log-error-stack "
        "aggregate-engine-logging enable-log-outputs enable-log-deltas "
        "enable-logging-iteration-details"
    ),
    "metrics are at /metrics, with vLLM's names": (
        "show-hidden-metrics-for-version collect-detailed-traces "
        "kv-cache-metrics kv-cache-metrics-sample enable-mfu-metrics enable-server-load-tracking "
        "profiler-config"
    ),
    "the front end always runs in a process of its own": "disable-frontend-multiprocessing",
    "see --max-header-bytes and --max-header-count": (
        "h11-max-incomplete-event-size h11-max-header-count"
    ),
    "browsers may send any method and header, from --allowed-origins": (
        "allow-credentials allowed-methods allowed-headers"
    ),
    "cached tokens are always in usage": "enable-prompt-tokens-details",
    "the request id is always in the answer's headers": "enable-request-id-headers",
    "a request asks for usage with stream_options": "enable-force-include-usage",
    "content is given to a template in the form that it reads": "chat-template-content-format",
    "a request gives chat_template_kwargs": "default-chat-template-kwargs",
    "answers have the role assistant": "response-role",
    "a request asks for token ids with return_token_ids": "return-tokens-as-token-ids",
    "zlm's server is not made of ASGI parts": "middleware disable-fastapi-docs grpc",
    "what is pooled is read from the checkpoint": "pooler-config override-pooler-config",
    "see the routes /tokenize and /detokenize": "enable-tokenizer-info-endpoint tokens-only",
    "zlm has no such options": (
        "additional-config disable-async-output-proc enable-return-routed-experts "
        "weight-transfer-config fail-on-environ-validation performance-mode"
    ),
}

UNSUPPORTED: dict[str, str] = {
    f"--{name}": why
    for table in (LATER, INSTEAD)
    for why, names in table.items()
    for name in names.split()
} | {
    "-O": "nothing is compiled by tracing",
    "-cc": "nothing is compiled by tracing",
    "-dp": "zlm runs one engine: run one server a replica",
    "-ep": EXPERTS,
}
