#!/usr/bin/env bash
# Starts one node's ranks of a run over several nodes: the same command on each of them.
#
#     bash examples/several_nodes.sh node1:29500 /shared/run1    # one of the nodes, a port that is free there; a folder that all see
#
# NODES=2:4: at least two nodes, at most four. RANKS=8: so many on each. Without arguments two nodes of two ranks run on this
# machine, to see it work. Slurm needs no agent: srun --ntasks-per-node 8 python examples/several_nodes.py /shared/run1
set -euo pipefail

if [ $# -eq 0 ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    code=0
    bash "$0" "127.0.0.1:${PORT:-29517}" "$folder/run" > "$folder/node1.txt" &
    bash "$0" "127.0.0.1:${PORT:-29517}" "$folder/run" > "$folder/node2.txt" || code=$?
    wait $! || code=$?
    cat "$folder/node1.txt" "$folder/node2.txt" # only rank 0 prints, and it may be on either
    exit $code
fi

# Plain torchrun does as well:
# torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node1:29500 --max-restarts 3 examples/several_nodes.py ...
exec meshfold run --nodes "${NODES:-2}" --ranks "${RANKS:-2}" --rendezvous "$1" --restarts 3 "$(dirname "$0")/several_nodes.py" "$2"
