#!/bin/bash
# go.sh JOBS SECONDS WORKERS
export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
mkdir -p /tmp/mps
[ -e /tmp/mps/control ] || nvidia-cuda-mps-control -d || unset CUDA_MPS_PIPE_DIRECTORY
cd "$(dirname "$0")"
export LIMIT=$(( $(date +%s) + $2 ))
rm -rf /tmp/lock; mkdir -p /tmp/lock
for i in $(seq $3); do python3 lab.py $1 /tmp/lock $OUT/runs.jsonl cuda >> $OUT/log 2>&1 & done
sleep 60; nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
wait
grep -v Warning $OUT/log | cut -c1-200
