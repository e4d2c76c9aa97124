#!/bin/bash
# One shard of a matrix for each job of an array, into a results folder on a disk that all nodes share:
#
#   sbatch --array=1-16 benchmarks/slurm/array.sh scaling-gpu runs/gpu [further options of attn-zoo run]
#
# Submit it again to go on where jobs ran out of time. To submit some of the jobs only, say of how many:
#
#   SHARDS=16 sbatch --array=3,5 benchmarks/slurm/array.sh scaling-gpu runs/gpu
#
#SBATCH --job-name=attn-zoo
#SBATCH --nodes=1 --ntasks=1 --exclusive
#SBATCH --gres=gpu:1
#SBATCH --time=01:00:00
set -euo pipefail
matrix=$1 folder=$2
shift 2
shard=${SLURM_ARRAY_TASK_ID:?submit it with --array=1-N}/${SHARDS:-$SLURM_ARRAY_TASK_MAX}
limit=()
if [ -n "${SLURM_JOB_END_TIME:-}" ]; then # cells that would not end in time are left for the next job
    left=$(((SLURM_JOB_END_TIME - $(date +%s)) / 60 - 1))
    limit=(--time-limit $((left > 0 ? left : 0)))
fi
exec attn-zoo run "$matrix" --out "$folder" --shard "$shard" "${limit[@]}" "$@"
