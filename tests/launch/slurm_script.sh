#!/bin/bash
#SBATCH --job-name=weft-first
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --time=2:00:00
#SBATCH --partition=gpu
#SBATCH --chdir=/shared/work
#SBATCH --output='/shared/my runs/first/slurm-%j.out'
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@660
#SBATCH --gpus-per-node=8
#SBATCH --comment='two words'
#SBATCH --exclusive

run='/shared/my runs/first'
token='/shared/my runs/first/slurm.token'

# Slurm sends USR1 to this shell 660 s before the time limit; the ranks then finish their step and save.
# On scancel and on requeue Slurm itself sends TERM to the ranks, and this shell waits for them.
at_limit=
ended_by_slurm=
trap 'at_limit=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'ended_by_slurm=1' TERM

# The address is looked up on the last node: the first one may know its own name by a loopback address alone.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
name=$(scontrol --oneliner show node "${nodes[0]}" | grep -oP '\bNodeAddr=\K\S+')
address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[-1]}" getent ahostsv4 "$name" | awk 'NR == 1 { print $1 }')
if [ -z "$address" ]; then
    echo "weft: ${nodes[-1]} finds no IPv4 address of ${nodes[0]} (NodeAddr=$name)" >&2
    exit 2
fi
endpoint=$address:$((20000 + SLURM_JOB_ID % 20000))

start_host() { # on each node
    exec /env/bin/python -m weft train /shared/job.toml --out "$run" --resume auto --max-restarts 0 --nproc-per-node 8 --set 'optimizer.name=it'"'"'s' --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --rdzv-endpoint "$endpoint" --token-file "$token"
}
export -f start_host
export run setting token endpoint

newest_checkpoint() {
    ls -d "$run"/step-* 2> /dev/null | tail -n 1
}
before=$(newest_checkpoint)

# The launchers of a job end together: Slurm must not kill one that still saves because another one has ended.
# After 660 s it does: the task of a lost node would never end.
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=660 \
    bash -c start_host &
step=$!
while kill -0 "$step" 2> /dev/null; do
    wait "$step" # a signal ends the wait
done
wait "$step"
code=$?

reason=
case $code in
    143) [ -n "$at_limit" ] && reason="the time limit is near" ;;
    1 | 137) reason="a rank or a node failed" ;;
esac
if [ -n "$reason" ] && [ -z "$ended_by_slurm" ]; then
    if [ "$(newest_checkpoint)" != "$before" ]; then
        echo "weft: $reason: the job is queued again and resumes from $(newest_checkpoint)"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "weft: $reason, and there is no new checkpoint: the job ends" >&2
    fi
fi
exit "$code"
