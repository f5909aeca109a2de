"""Every option `vllm serve` has had from 0.10 to 0.33, so that a misspelt one is told from one that is not modelled.

Source: the releases' own engine/arg_utils.py and entrypoints' cli_args.py, 0.10.0 to 0.33.0; whether an option takes a
value is what its dataclass field says. HARMLESS change no byte on the card: parsers, logging, HTTP, where files are.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HARMLESS_SWITCHES = _names("""
--aggregate-engine-logging --allow-credentials --allow-deprecated-quantization
--cohere-is-reasoning-model --cudagraph-metrics --disable-async-output-proc --disable-cascade-attn
--disable-chunked-mm-input --disable-fastapi-docs --disable-log-requests --disable-log-stats
--disable-mm-preprocessor-cache --disable-uvicorn-access-log --enable-auto-tool-choice --enable-chunked-prefill
--enable-flash-late-interaction --enable-force-include-usage --enable-layerwise-nvtx-tracing --enable-log-deltas
--enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-mfu-metrics
--enable-offline-docs --enable-per-request-metrics --enable-prompt-tokens-details
--enable-request-id-headers --enable-scale-out --enable-server-load-tracking --enable-ssl-refresh
--enable-tokenizer-info-endpoint --eplb-log-balancedness --exclude-tools-when-tool-choice-none
--fail-on-environ-validation --grpc --guided-decoding-disable-additional-properties
--guided-decoding-disable-any-whitespace --guided-decoding-disable-fallback --headless --interleave-mm-strings
--jit-monitor-verbose --kv-cache-metrics --log-error-stack --multi-step-stream-outputs --numa-bind
--ray-workers-use-nsight --return-sampling-mask --return-tokens-as-token-ids --scheduler-reserve-full-isl
--skip-tokenizer-init --tokens-only --trust-remote-code --trust-request-chat-template --trust-request-mm-kwargs
--use-fp64-gumbel --use-tqdm-on-load
""")

_HARMLESS_VALUES = _names("""
--allowed-headers --allowed-local-media-path --allowed-media-domains --allowed-methods --allowed-origins
--anthropic-disabled-thinking-effort --api-key --api-server-count --chat-template --chat-template-content-format
--code-revision --cohere-format --collect-detailed-traces --config-format --cpu-distributed-timeout-seconds
--custom-histogram-buckets --data-parallel-address --data-parallel-backend --data-parallel-rank
--data-parallel-rpc-port --data-parallel-start-rank --data-parallel-supervisor-port
--default-chat-template-kwargs --disable-access-log-for-endpoints --distributed-executor-backend
--distributed-timeout-seconds --download-dir --dp-supervisor-probe-failure-threshold
--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s --fingerprint-mode --fingerprint-value
--generation-config --grpc-port --guided-decoding-backend --h11-max-header-count --h11-max-incomplete-event-size
--hf-token --host --ignore-patterns --io-processor-plugin --jit-monitor-mode --kv-cache-metrics-sample
--kv-events-config --load-format --log-config-file --log-level --logging-config --logits-processor-pattern
--logprobs-mode --master-addr --master-port --max-log-len --max-logprobs --max-num-queued-reqs
--max-num-queued-tokens --max-parallel-loading-workers --media-io-kwargs --middleware --mm-hasher-algorithm
--mm-processor-cache-gb --mm-processor-cache-type --mm-shm-cache-max-object-size-mb --model
--model-loader-extra-config --node-rank --numa-bind-cpus --numa-bind-nodes --otlp-traces-endpoint
--override-generation-config --per-request-spec-decode-metrics --port --prefix-caching-hash-algo
--pt-load-map-location --reasoning-config --reasoning-effort-map --reasoning-parser --reasoning-parser-plugin
--renderer-num-workers --response-role --revision --root-path --safetensors-load-strategy
--safetensors-prefetch-block-size --safetensors-prefetch-num-threads --scheduling-policy --seed
--served-model-name --show-hidden-metrics-for-version --shutdown-timeout --sse-keep-alive-interval
--ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile --stream-interval
--structured-outputs-config --swap-space --tokenizer --tokenizer-mode --tokenizer-revision --tool-call-parser
--tool-parser-plugin --tool-server --tool-strict-level --uds --uvicorn-log-level --watchdog-config -dpa -dpb
-dpn -dpp -dpr -n -r
""")

_SWITCHES = _names("""
--calculate-kv-scales --data-parallel-external-lb --data-parallel-hybrid-lb
--data-parallel-multi-port-external-lb --dcp-q-replicate
--disable-hybrid-kv-cache-manager --disable-nccl-for-dp-synchronization --disable-sliding-window
--enable-batch-sharded-sampling --enable-bf16x3-router-gemm --enable-cumem-allocator --enable-dbo
--enable-elastic-ep --enable-ep-weight-filter --enable-eplb --enable-fault-tolerance
--enable-flashinfer-autotune --enable-hc-sp --enable-lora --enable-lora-bias
--enable-mamba-cache-stochastic-rounding --enable-mamba-fine-grained-prefix-cache
--enable-mamba-shared-prefix-checkpoint --enable-mixed-moe-lora-format --enable-mm-embeds
--enable-moe-shared-loras --enable-multimodal-encoder-data-parallel --enable-nccl-comm-suspend
--enable-prompt-adapter --enable-prompt-embeds --enable-return-routed-experts --enable-shm-tensor-arena
--enable-sleep-mode --enable-tower-connector-lora --enable-trace-replay --fully-sharded-loras
--kv-sharing-fast-prefill --long-prefill-token-threshold-adaptive --mm-encoder-only --monokernel
--skip-mm-profiling --sleep-mode-offload-cudagraph --specialize-active-lora --swa-bounded-replay --use-replayssm
-dpe -dph -dpm
""")

_VALUES = _names("""
--additional-config --all2all-backend --attention-config --aux-output-config --config --convert
--cp-kv-cache-interleave-size --cpu-offload-gb --cpu-offload-params --cuda-graph-sizes --cudagraph-capture-sizes
--data-parallel-size-local --dbo-decode-token-threshold --dbo-prefill-token-threshold --dcp-comm-backend
--dcp-kv-cache-interleave-size --default-mm-loras --device-ids --device-memory-utilization --diffusion-config
--dp-sync-interval --ec-manager-config --ec-transfer-config --elastic-ep-max-dp-size --engram-config
--eplb-config --eplb-step-interval --eplb-window-size --expert-placement-strategy --fault-tolerance-config
--gdn-prefill-backend --hf-config-path --ir-op-priority --kda-decode-backend --kda-prefill-backend
--kernel-config --kv-cache-dtype-skip-layers --kv-offloading-backend --kv-offloading-size --kv-transfer-config
--logits-processors --long-prefill-token-threshold --lora-dtype --lora-extra-vocab-size --lora-modules
--lora-target-modules --mamba-backend --mamba-block-size --mamba-cache-dtype --mamba-cache-mode
--mamba-cache-philox-rounds --mamba-ssm-cache-dtype --mamba-ssu-algorithm --max-cpu-loras
--max-cudagraph-capture-size --max-long-partial-prefills --max-lora-cls-labels --max-lora-rank --max-loras
--max-num-active-seqs --max-num-partial-prefills --max-num-scheduled-tokens --max-seq-len-to-capture
--mm-device-do-normalize --mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
--mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --mm-ipc-gpu-memory-gb --mm-processor-device
--mm-processor-kwargs --mm-tensor-ipc --model-class-overrides --model-impl --nnodes --num-gpu-blocks-override
--num-lookahead-slots --num-redundant-experts --num-scheduler-steps --offload-backend --offload-group-size
--offload-num-in-group --offload-params --offload-prefetch-step --optimization-level --override-attention-dtype
--override-neuron-config --override-pooler-config --performance-mode --pooler-config --preemption-mode
--prefill-context-parallel-size --prefill-schedule-interval --prefix-cache-retention-interval
--prefix-match-unit --profiler-config --quantization-config --replayssm-buffer-len --rope-scaling --rope-theta
--runner --scheduler-cls --scheduler-delay-factor --sleep-mode-backend --sleep-preserve-parameter-names
--sparse-indexer-topk-backend --spec-method --spec-model --spec-tokens --speculative-config --task --ubatch-size
--video-pruning-method --video-pruning-rate --watermark --watermark-config --weight-transfer-config --worker-cls
--worker-extension-cls -O -ac -asc -dc -dpl -pcp -sc
""")

HARMLESS = _HARMLESS_SWITCHES | {switch.replace("--", "--no-", 1) for switch in _HARMLESS_SWITCHES} | _HARMLESS_VALUES
"""Options the answer does not depend on."""

ENGINE_FLAGS = HARMLESS | _SWITCHES | _VALUES
"""Options the engine has and `fit` does not model."""


def is_engine_switch(flag: str) -> bool | None:
    """Whether an engine option stands alone; None where the engine has no such option. Every switch has a --no- form,
    and `--some-config.key` sets one key of a JSON option."""
    plain = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag
    if plain in _SWITCHES or plain in _HARMLESS_SWITCHES:
        return True
    return False if flag.partition(".")[0] in _VALUES | _HARMLESS_VALUES else None
