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
quoted() { printf '%q ' "$@"; }  # what the other host's shell reads as it was here

read -ra hosts -d '' <<<"${1:?the hosts are missing, as in \"host1 host2\"}" || true
shift
pids=()
for rank in "${!hosts[@]}"; do
  joins=(MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT="${PORT:-29500}" WORLD_SIZE="${#hosts[@]}")
  program=(env "${joins[@]}" RANK="$rank" "${PYTHON:-python}" -u "$@")
  # -tt: what runs there ends when this script does.
  ssh -tt -- "${hosts[$rank]}" "cd $(quoted "$PWD") && $(quoted "${program[@]}")" </dev/null &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
# One that fails ends all.
for _ in "${pids[@]}"; do wait -n; done
