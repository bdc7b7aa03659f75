#!/usr/bin/env bash
# Train a small GPT on the Python standard library's sources with K-FAC under DeepSpeed ZeRO-2, on
# two ranks (one on a machine with a single GPU). Further arguments go to train_gpt.py:
#
#   bash launch/quickstart.sh --steps 100 --text my_texts/
#
# DS_KFAC_RANKS sets the number of ranks; launch/setup_env.sh lists the other variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env deepspeed,plots

ranks=2
if ((GPUS == 1)); then ranks=1; fi
ranks="${DS_KFAC_RANKS:-$ranks}"
# A port of its own lets several trainings share a machine.
port="$("$PY" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')"

echo "training on $ranks rank(s), $(((GPUS > 0)) && echo "GPU" || echo "CPU")"
"$PY" "$VENV/bin/deepspeed" --quiet --num_gpus "$ranks" --master_port "$port" \
    "$ROOT/launch/train_gpt.py" \
    --deepspeed --deepspeed_config "$ROOT/configs/zero2_kfac.json" \
    --out "$ROOT/runs/quickstart" "$@"
