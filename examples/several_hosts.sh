#!/usr/bin/env bash
# Trains on several hosts by plain ssh: examples/several_hosts.sh "host1 host2" my_program.py
# One process a host, driving all of its GPUs. The hosts share a file system, where the program
# and its checkpoints are; zerojax.initialize() in the program reads the variables set here.
set -euo pipefail
read -ra hosts <<<"$1"
shift
command=$(printf '%q ' "$@")
for rank in "${!hosts[@]}"; do
  ssh "${hosts[$rank]}" "cd $(printf '%q' "$PWD") && MASTER_ADDR=${hosts[0]} MASTER_PORT=29500 \
    WORLD_SIZE=${#hosts[@]} RANK=$rank python -u $command" &
done
wait
