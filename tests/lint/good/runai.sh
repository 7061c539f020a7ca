#!/usr/bin/env bash
set -o pipefail

runai training pytorch submit distributed-job -p mlo \
    --workers 1 -g 8 -i registry.example.org/mlo/base:v3 \
    --annotation k8s.v1.cni.cncf.io/networks=kube-system/roce \
    --extended-resource rdma/rdma=1 \
    -- bash -c 'set -o pipefail
export NCCL_IB_HCA==mlx5_bond_0
python -m torch.distributed.run \
  --nnodes="$PET_NNODES" \
  --node-rank="$RANK" \
  --nproc-per-node="$RUNAI_NUM_OF_GPUS" \
  --master-addr="$MASTER_ADDR" \
  --master-port="$MASTER_PORT" \
  train.py 2>&1 | tee "rank_${RANK}.log"'
