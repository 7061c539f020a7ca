#!/usr/bin/env bash
# usage: torchrun.sh NODE_RANK; once on each of two machines. Don't use "–" or `$(RANK)` here.
set -euo pipefail

node_rank=${1:?which node am I, 0 or 1}
export MASTER_ADDR=${MASTER_ADDR:?set it to node 0}
export OMP_NUM_THREADS=8
export NCCL_SOCKET_IFNAME==enp65s0 GLOO_SOCKET_IFNAME=enp65s0

if [ "$node_rank" -eq 0 ]; then
  echo "node 0 – the others dial $MASTER_ADDR; see 'docker stop \$(docker ps -q)' in the wiki"
fi

torchrun \
  --nnodes=2 \
  --nproc-per-node=4 \
  --node-rank="$node_rank" \
  --master-addr="$MASTER_ADDR" \
  --master-port=29541 \
  --max-restarts=0 \
  --tee 3 \
  train.py "${@:2}" 2>&1 | tee "node-$node_rank.log"
