#!/bin/bash
# Every program of the emulated cluster: the name by which it is called says what it does. Each start leaves one record in $SEEN.
# Its variables begin with s_: a script may export any other name.
s_name=${STUB_AS:-${0##*/}}
unset STUB_AS

record() {  # fields that end in 0x1f: name, node, image, world, background, folder, phase, number of words, words, environment
  local s_value s_background=no
  [[ /proc/$$/fd/0 -ef /dev/null ]] && s_background=yes  # bash gives it to what it starts with &
  {
    printf '%s\x1f' "$s_name" "${SLURM_NODEID:-0}" "${STUB_IMAGE-}" "${STUB_WORLD:-1}" "$s_background" "$PWD" "${STUB_PHASE-}" "$#" "$@"
    while IFS= read -r -d '' s_value; do printf '%s\x1f' "$s_value"; done < /proc/$$/environ
  } > "$SEEN/$EPOCHREALTIME.$$"
}

run() {  # a program of the emulated cluster, by whatever path it is called
  [[ $1 == /.singularity.d/runscript ]] && shift
  local s_program=${1##*/}
  if [[ $1 == */* && ! -x $1 && -e /stubs/$s_program ]]; then
    unset STUB_STAND_IN
    STUB_AS=$s_program exec /stubs/stub "${@:2}"
  elif [[ $1 != */* ]] && ! type -P "$1" > /dev/null; then
    STUB_AS=$1 exec /stubs/stub "${@:2}"
  fi
  exec "$@"
}

tasks() {  # NODES TASKS FIRST COMMAND...: one after the other, each on its node; the highest exit code counts
  local s_nodes=$1 s_count=$2 s_first=$3 s_task s_code=0 s_highest=0
  shift 3
  [[ $1 == : ]] && return
  for ((s_task = 0; s_task < s_count; s_task++)); do
    (
      export SLURM_PROCID=$s_task SLURM_NTASKS=$s_count SLURM_NPROCS=$s_count SLURM_STEP_NODES=$s_nodes
      export SLURM_NODEID=$(( s_first + s_task * s_nodes / s_count )) STUB_WORLD=$s_count
      export SLURMD_NODENAME=node$SLURM_NODEID SLURM_LOCALID=$(( s_task - (s_task * s_nodes / s_count * s_count + s_nodes - 1) / s_nodes ))
      run "$@"
    )
    s_code=$?
    (( s_code > s_highest )) && s_highest=$s_code
  done
  exit "$s_highest"
}

ranks() {  # NODES PER_NODE WORDS...: the ranks that a launcher starts on its node
  local s_nodes=$1 s_each=$2 s_local_rank s_code=0 s_highest=0
  shift 2
  for ((s_local_rank = 0; s_local_rank < s_each; s_local_rank++)); do
    STUB_WORLD=$(( s_nodes * s_each )) LOCAL_RANK=$s_local_rank STUB_AS=python /stubs/stub -u "$@"
    s_code=$?
    (( s_code > s_highest )) && s_highest=$s_code
  done
  exit "$s_highest"
}

launch() {  # flags of torchrun and its like, then the program
  local s_nodes=1 s_each=1 s_all=0
  while [[ $1 == -* ]]; do
    local s_flag=${1//_/-} s_value=$2 s_taken=2
    [[ $s_flag == *=* ]] && { s_value=${s_flag#*=}; s_flag=${s_flag%%=*}; s_value=${1#*=}; s_taken=1; }
    case $s_flag in
      --nnodes|--num-machines|--num-nodes) s_nodes=$s_value ;;
      --nproc-per-node|--num-gpus) s_each=$s_value ;;
      --num-processes) s_all=$s_value ;;
      --standalone|--no-python|--multi-gpu|--use-deepspeed|--use-fsdp|--same-network|--main|--no-local-rank|--use-env) s_taken=1 ;;
      -m) break ;;
    esac
    shift "$s_taken" || break
  done
  [[ $s_each == gpu || $s_each == auto ]] && s_each=${SLURM_GPUS_ON_NODE:-1}
  (( s_all )) && s_each=$(( s_all / s_nodes ))
  if [[ -n $STUB_STAND_IN && $0 == /stubs/* ]]; then  # what drumbeat puts on PATH: its ranks are there already
    STUB_AS=python exec /stubs/stub -u "$@"
  fi
  ranks "$s_nodes" "$s_each" "$@"
}

case $s_name in
  run) run "$@" ;;
  hostname) echo "node${SLURM_NODEID:-0}" ;;
  nproc) echo 8 ;;
  sleep) exit 0 ;;
  whoami) echo me ;;
  nvidia-smi|rocm-smi)
    for ((i = 0; i < ${SLURM_GPUS_ON_NODE:-0}; i++)); do echo "GPU $i: H200"; done ;;
  scontrol) [[ $1 == show && $2 == hostname* ]] && for ((i = 0; i < SLURM_NNODES; i++)); do echo "node$i"; done ;;
  squeue|sinfo|sacct|sbatch|scancel|which|free|ip|module|ml|conda|mamba) [[ $s_name == sbatch ]] && echo 78; record "$@" ;;
  srun)
    s_nodes= s_count= s_per= s_first=0 s_multi=
    while [[ $1 == -* ]]; do
      s_flag=$1 s_value=$2 s_taken=2
      case $s_flag in
        --*=*) s_value=${s_flag#*=}; s_flag=${s_flag%%=*}; s_taken=1 ;;
        --export|--nodes|--ntasks|--ntasks-per-node|--nodelist|--cpus-per-task|--mem|--time|--output|--error|--chdir|--gpus*| \
          --gres|--cpu-bind|--mpi|--job-name|--jobid|--relative|--distribution|--exclude|--container-*|--wait|--signal| \
          --partition|--account|--constraint|--cpus-per-gpu|--mem-per-cpu|--threads-per-core|--hint|--network|--het-group) ;;
        --*) s_taken=1 ;;
        -[NnwcotxJpAGDrmeC]) ;;
        -[NnwcotxJpAGDrmeC]*) s_value=${s_flag:2}; s_flag=${s_flag:0:2}; s_taken=1 ;;
        *) s_taken=1 ;;
      esac
      case $s_flag in
        -N|--nodes) s_nodes=$s_value ;;
        -n|--ntasks) s_count=$s_value ;;
        --ntasks-per-node) s_per=$s_value ;;
        -w|--nodelist) s_first=${s_value#node}; s_first=${s_first//[^0-9]*/}; s_first=${s_first:-0}; s_nodes=${s_nodes:-1}; [[ $s_value == *,* ]] && s_first=0 s_nodes= ;;
        -r|--relative) s_first=$s_value ;;
        -c|--cpus-per-task) export SLURM_CPUS_PER_TASK=$s_value ;;
        -D|--chdir) cd "$s_value" || exit 1 ;;
        --container-image) export STUB_IMAGE=$s_value; mkdir -p /image/code ;;
        --container-workdir) mkdir -p "$s_value" && cd "$s_value" || exit 1 ;;
        --export)
          if [[ ,$s_value, != *,ALL,* ]]; then
            for s_each in $(compgen -e); do
              case $s_each in SLURM_*|STUB_*|SEEN|PATH|HOME|USER|PWD|FAILING) ;; *) [[ ,$s_value, == *,$s_each,* ]] || unset "$s_each" ;; esac
            done
          fi
          IFS=, read -ra s_given <<< "$s_value"
          for s_each in "${s_given[@]}"; do [[ $s_each == *=* ]] && export "$s_each"; done ;;
      esac
      shift "$s_taken" || break
    done
    (($#)) || exit 0
    s_used=${s_nodes:-$SLURM_NNODES}
    [[ $s_count || ! $s_per ]] || s_count=$(( s_used * s_per ))
    [[ $s_count ]] || if [[ $s_nodes ]]; then s_count=$(( ${SLURM_NTASKS_PER_NODE:-1} * s_used )); else s_count=${SLURM_NTASKS:-$s_used}; fi
    (( s_used > s_count )) && s_used=$s_count
    tasks "$s_used" "$s_count" "$s_first" "$@" ;;
  mpirun|mpiexec|mpiexec.hydra)
    s_count=${SLURM_NTASKS:-$SLURM_NNODES}
    while [[ $1 == -* ]]; do
      case $1 in
        -np|-n|--np) s_count=$2; shift 2 ;;
        -x|-genv|--map-by|--bind-to|-npernode|--npernode|-ppn|--hostfile|-hosts|--host|-H|--mca) shift 2; [[ $1 == *=* ]] && shift ;;
        *) shift ;;
      esac
    done
    tasks "$(( s_count < SLURM_NNODES ? s_count : SLURM_NNODES ))" "$s_count" 0 "$@" ;;
  apptainer|singularity)
    shift
    while [[ $1 == -* ]]; do
      case $1 in
        --env=*) export "${1#--env=}"; shift ;;
        --env) export "$2"; shift 2 ;;
        --pwd|--cwd) s_folder=$2; shift 2 ;;
        --pwd=*|--cwd=*) s_folder=${1#*=}; shift ;;
        --bind|-B|--home|-H|--overlay|-o|--workdir|-W) shift 2 ;;
        *) shift ;;
      esac
    done
    export STUB_IMAGE=$1
    shift
    mkdir -p /image/code  # folders of the image
    [[ -z $s_folder ]] || cd "$s_folder" || exit 255
    run "$@" ;;
  torchrun|composer) launch "$@" ;;
  deepspeed) export SLURM_GPUS_ON_NODE; launch "$@" ;;
  accelerate) [[ $1 == launch ]] || exit 0; shift; launch "$@" ;;
  python*)
    s_words=" $* "
    if [[ $s_words == *" -m torch.distributed."* || $s_words == *" -m accelerate.commands.launch "* ]]; then
      while [[ $1 != torch.distributed.* && $1 != accelerate.commands.launch ]]; do shift; done
      shift
      launch "$@"
    fi
    [[ $1 == -c ]] && echo 1
    record "$@"
    [[ $1 == -u ]] && shift
    [[ $FAILING && ( $1 == "$FAILING" || $2 == "$FAILING" ) ]] && exit 3
    exit 0 ;;
  *)
    record "$@"
    [[ $s_name == "$FAILING" ]] && exit 4
    exit 0 ;;
esac
