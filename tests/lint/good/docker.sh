#!/bin/bash
set -e
name=train-$USER-$$

docker run --rm --name "$name" \
  --network host --ipc=host \
  --device /dev/kfd --device /dev/dri --device /dev/infiniband \
  --group-add video --ulimit memlock=-1 \
  -e NCCL_SOCKET_IFNAME=ens50f0np0 -e HF_TOKEN \
  -v "$PWD":/work -w /work \
  rocm/pytorch-training:v25.6 \
  torchrun --standalone --nproc-per-node=8 train.py &

trap 'docker stop "$name"' TERM INT
wait $!
