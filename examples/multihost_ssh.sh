#!/usr/bin/env bash
# Trains on several hosts with plain ssh:
#
#     examples/multihost_ssh.sh "host1 host2" examples/train_gpt.py --checkpoints runs/gpt
#
# One process per host drives all of its GPUs. The hosts share a file system with the program and
# its checkpoints, and get this host's XLA_FLAGS. zerojax.initialize() reads the variables set here,
# which are torchrun's. The other hosts connect to the first one: they must reach its PORT (29500).
# PYTHON names the interpreter.
# With torchrun, `torchrun --nnodes ... --no-python python examples/train_gpt.py` does the same.
set -euo pipefail
quoted() { printf '%q ' "$@"; }  # quotes words for the other host's shell

read -ra hosts -d '' <<<"${1:?the hosts are missing, as in \"host1 host2\"}" || true
shift
pids=()
for rank in "${!hosts[@]}"; do
  joins=(MASTER_ADDR="${hosts[0]#*@}" MASTER_PORT="${PORT:-29500}" WORLD_SIZE="${#hosts[@]}")
  program=(env "${joins[@]}" RANK="$rank" XLA_FLAGS="${XLA_FLAGS:-}" "${PYTHON:-python}" -u "$@")
  # -tt ends the program on the other host when this script ends.
  ssh -tt -- "${hosts[$rank]}" "cd $(quoted "$PWD") && $(quoted "${program[@]}")" </dev/null &
  pids+=($!)
done
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
# If one fails, all end.
for _ in "${pids[@]}"; do wait -n; done
