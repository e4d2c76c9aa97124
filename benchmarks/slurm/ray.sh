#!/bin/bash
# One run on all nodes of an allocation, by Ray; the results folder is written from the first node only:
#
#   sbatch --nodes=8 benchmarks/slurm/ray.sh scaling-gpu runs/gpu [further options of attn-zoo run]
#
# Submit it again to go on. attn-zoo[ray] must be installed on every node, in one version of Python.
#
#SBATCH --job-name=attn-zoo
#SBATCH --ntasks-per-node=1 --exclusive
#SBATCH --gres=gpu:8
#SBATCH --time=04:00:00
set -euo pipefail
matrix=$1 folder=$2
shift 2
hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?submit it with sbatch}")
address=${hosts%%$'\n'*}:${RAY_PORT:-6379}  # no pipe into head: it may end before scontrol has written all
# Only who knows the token may join, on nodes that others use too.
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
# Starts Ray on every node, waits for all of them, runs the command on the first, and ends Ray with it.
exec srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    attn-zoo run "$matrix" --out "$folder" --engine ray --address "$address" "$@"
