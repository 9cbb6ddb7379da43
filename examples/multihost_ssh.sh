#!/usr/bin/env bash
# Trains on several hosts by plain ssh:
#
#     examples/multihost_ssh.sh "host1 host2" examples/train_gpt.py --checkpoints runs/gpt
#
# One process a host, driving all of its GPUs. The hosts share a file system, where the program
# and its checkpoints are; zerojax.initialize() reads the variables set here, torchrun's. The first
# host is where the others meet: they must reach PORT (29500) there. PYTHON names the interpreter.
# Where there is torchrun, `torchrun --nnodes ... --no-python python examples/train_gpt.py` does too.
set -euo pipefail
read -ra hosts <<<"$1"
shift
command=$(printf '%q ' "${PYTHON:-python}" -u "$@")
pids=()
for rank in "${!hosts[@]}"; do
  # -tt: what runs there ends when this script does.
  ssh -tt "${hosts[$rank]}" "cd $(printf '%q' "$PWD") && MASTER_ADDR=${hosts[0]#*@} \
    MASTER_PORT=${PORT:-29500} WORLD_SIZE=${#hosts[@]} RANK=$rank $command" </dev/null &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
# One that fails ends all.
for _ in "${pids[@]}"; do wait -n; done
