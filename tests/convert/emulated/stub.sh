#!/bin/bash
# Every program of the emulated cluster: the name by which it is called says what it does. Each start leaves one record in $SEEN.
name=${STUB_AS:-${0##*/}}
unset STUB_AS

record() {  # fields that end in 0x1f: name, node, image, world, background, folder, phase, number of words, words, environment
  local value background=no
  [[ /proc/$$/fd/0 -ef /dev/null ]] && background=yes  # bash gives it to what it starts with &
  {
    printf '%s\x1f' "$name" "${SLURM_NODEID:-0}" "${STUB_IMAGE-}" "${STUB_WORLD:-1}" "$background" "$PWD" "${STUB_PHASE-}" "$#" "$@"
    while IFS= read -r -d '' value; do printf '%s\x1f' "$value"; done < /proc/$$/environ
  } > "$SEEN/$EPOCHREALTIME.$$"
}

run() {  # a program of the emulated cluster, by whatever path it is called
  local program=${1##*/}
  if [[ $1 == */* && ! -x $1 && -e /stubs/$program ]]; then
    unset STUB_STAND_IN
    STUB_AS=$program exec /stubs/stub "${@:2}"
  elif [[ $1 != */* ]] && ! type -P "$1" > /dev/null; then
    STUB_AS=$1 exec /stubs/stub "${@:2}"
  fi
  exec "$@"
}

tasks() {  # NODES TASKS FIRST COMMAND...: one after the other, each on its node; the highest exit code counts
  local nodes=$1 count=$2 first=$3 task code=0 highest=0
  shift 3
  [[ $1 == : ]] && return
  for ((task = 0; task < count; task++)); do
    (
      export SLURM_PROCID=$task SLURM_NTASKS=$count SLURM_NPROCS=$count SLURM_STEP_NODES=$nodes
      export SLURM_NODEID=$(( first + task * nodes / count )) STUB_WORLD=$count
      export SLURMD_NODENAME=node$SLURM_NODEID SLURM_LOCALID=$(( task - (task * nodes / count * count + nodes - 1) / nodes ))
      run "$@"
    )
    code=$?
    (( code > highest )) && highest=$code
  done
  exit "$highest"
}

ranks() {  # NODES PER_NODE WORDS...: the ranks that a launcher starts on its node
  local nodes=$1 each=$2 local_rank code=0 highest=0
  shift 2
  for ((local_rank = 0; local_rank < each; local_rank++)); do
    STUB_WORLD=$(( nodes * each )) LOCAL_RANK=$local_rank STUB_AS=python /stubs/stub -u "$@"
    code=$?
    (( code > highest )) && highest=$code
  done
  exit "$highest"
}

launch() {  # flags of torchrun and its like, then the program
  local nodes=1 each=1 all=0
  while [[ $1 == -* ]]; do
    local flag=${1//_/-} value=$2 taken=2
    [[ $flag == *=* ]] && { value=${flag#*=}; flag=${flag%%=*}; value=${1#*=}; taken=1; }
    case $flag in
      --nnodes|--num-machines|--num-nodes) nodes=$value ;;
      --nproc-per-node|--num-gpus) each=$value ;;
      --num-processes) all=$value ;;
      --standalone|--no-python|--multi-gpu|--use-deepspeed|--use-fsdp|--same-network|--main|--no-local-rank|--use-env) taken=1 ;;
      -m) break ;;
    esac
    shift "$taken" || break
  done
  [[ $each == gpu || $each == auto ]] && each=${SLURM_GPUS_ON_NODE:-1}
  (( all )) && each=$(( all / nodes ))
  if [[ -n $STUB_STAND_IN && $0 == /stubs/* ]]; then  # what drumbeat puts on PATH: its ranks are there already
    STUB_AS=python exec /stubs/stub -u "$@"
  fi
  ranks "$nodes" "$each" "$@"
}

case $name in
  hostname) echo "node${SLURM_NODEID:-0}" ;;
  nproc) echo 8 ;;
  sleep) exit 0 ;;
  nvidia-smi|rocm-smi)
    for ((i = 0; i < ${SLURM_GPUS_ON_NODE:-0}; i++)); do echo "GPU $i: H200"; done ;;
  scontrol) [[ $1 == show && $2 == hostname* ]] && for ((i = 0; i < SLURM_NNODES; i++)); do echo "node$i"; done ;;
  squeue|sinfo|sacct|sbatch|scancel|which|free|ip|module|ml|conda|mamba) [[ $name == sbatch ]] && echo 78; record "$@" ;;
  srun)
    nodes= count= per= first=0 multi=
    while [[ $1 == -* ]]; do
      flag=$1 value=$2 taken=2
      case $flag in
        --*=*) value=${flag#*=}; flag=${flag%%=*}; taken=1 ;;
        --export|--nodes|--ntasks|--ntasks-per-node|--nodelist|--cpus-per-task|--mem|--time|--output|--error|--chdir|--gpus*| \
          --gres|--cpu-bind|--mpi|--job-name|--jobid|--relative|--distribution|--exclude|--container-*|--wait|--signal| \
          --partition|--account|--constraint|--cpus-per-gpu|--mem-per-cpu|--threads-per-core|--hint|--network|--het-group) ;;
        --*) taken=1 ;;
        -[NnwcotxJpAGDrmeC]) ;;
        -[NnwcotxJpAGDrmeC]*) value=${flag:2}; flag=${flag:0:2}; taken=1 ;;
        *) taken=1 ;;
      esac
      case $flag in
        -N|--nodes) nodes=$value ;;
        -n|--ntasks) count=$value ;;
        --ntasks-per-node) per=$value ;;
        -w|--nodelist) first=${value#node}; first=${first//[^0-9]*/}; first=${first:-0}; nodes=${nodes:-1}; [[ $value == *,* ]] && first=0 nodes= ;;
        -r|--relative) first=$value ;;
        -c|--cpus-per-task) export SLURM_CPUS_PER_TASK=$value ;;
        -D|--chdir) cd "$value" || exit 1 ;;
        --container-image) export STUB_IMAGE=$value; mkdir -p /image/code ;;
        --container-workdir) mkdir -p "$value" && cd "$value" || exit 1 ;;
        --export)
          if [[ ,$value, != *,ALL,* ]]; then
            for each in $(compgen -e); do
              case $each in SLURM_*|STUB_*|SEEN|PATH|HOME|USER|PWD|FAILING) ;; *) [[ ,$value, == *,$each,* ]] || unset "$each" ;; esac
            done
          fi
          IFS=, read -ra given <<< "$value"
          for each in "${given[@]}"; do [[ $each == *=* ]] && export "$each"; done ;;
      esac
      shift "$taken" || break
    done
    (($#)) || exit 0
    used=${nodes:-$SLURM_NNODES}
    [[ $count || ! $per ]] || count=$(( used * per ))
    [[ $count ]] || if [[ $nodes ]]; then count=$(( ${SLURM_NTASKS_PER_NODE:-1} * used )); else count=${SLURM_NTASKS:-$used}; fi
    (( used > count )) && used=$count
    tasks "$used" "$count" "$first" "$@" ;;
  mpirun|mpiexec|mpiexec.hydra)
    count=${SLURM_NTASKS:-$SLURM_NNODES}
    while [[ $1 == -* ]]; do
      case $1 in
        -np|-n|--np) count=$2; shift 2 ;;
        -x|-genv|--map-by|--bind-to|-npernode|--npernode|-ppn|--hostfile|-hosts|--host|-H|--mca) shift 2; [[ $1 == *=* ]] && shift ;;
        *) shift ;;
      esac
    done
    tasks "$(( count < SLURM_NNODES ? count : SLURM_NNODES ))" "$count" 0 "$@" ;;
  apptainer|singularity)
    shift
    while [[ $1 == -* ]]; do
      case $1 in
        --env=*) export "${1#--env=}"; shift ;;
        --env) export "$2"; shift 2 ;;
        --pwd|--cwd) folder=$2; shift 2 ;;
        --pwd=*|--cwd=*) folder=${1#*=}; shift ;;
        --bind|-B|--home|-H|--overlay|-o|--workdir|-W) shift 2 ;;
        *) shift ;;
      esac
    done
    export STUB_IMAGE=$1
    shift
    mkdir -p /image/code  # folders of the image
    [[ -z $folder ]] || cd "$folder" || exit 255
    run "$@" ;;
  torchrun|composer) launch "$@" ;;
  deepspeed) export SLURM_GPUS_ON_NODE; launch "$@" ;;
  accelerate) [[ $1 == launch ]] || exit 0; shift; launch "$@" ;;
  python*)
    words=" $* "
    if [[ $words == *" -m torch.distributed."* ]]; then
      while [[ $1 != torch.distributed.* ]]; do shift; done
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
    [[ $name == "$FAILING" ]] && exit 4
    exit 0 ;;
esac
