#!/bin/bash
# The root of a new mount and PID namespace without a network: nothing of this machine can be written from it, and nothing is on
# PATH but coreutils and the stubs. Standard input is a tar with /stubs/stub and /cases; standard output a tar of /seen.
set -e
chroot=$(command -v chroot)
root=$(mktemp -d)
mount -t tmpfs -o size=64m,mode=755 sandbox "$root"
cd "$root"
mkdir usr proc dev tmp stubs tools seen cases submit home image
mount --bind /usr usr && mount -o remount,bind,ro,nosuid usr
for each in bin lib lib64 sbin; do
  if [[ -L /$each ]]; then cp -P "/$each" .; elif [[ -e /$each ]]; then mkdir $each; mount --bind /$each $each; mount -o remount,bind,ro,nosuid $each; fi
done
mount -t proc proc proc
for each in null zero urandom; do : > dev/$each; mount --bind /dev/$each dev/$each; done
ln -s /proc/self/fd dev/fd
chmod 777 tmp seen submit home image
tar -x
for each in srun mpirun mpiexec mpiexec.hydra torchrun composer deepspeed accelerate python python3 apptainer singularity module ml \
  scontrol squeue sinfo sacct sbatch scancel hostname nproc nvidia-smi rocm-smi conda mamba sleep whoami run $(cat stubs/names); do
  ln -sf stub stubs/$each
done
for each in bash sh env cat ls mkdir rm rmdir cp mv ln touch chmod grep egrep sed awk cut head tail tr sort uniq wc seq date \
  basename dirname readlink realpath expr tee xargs find id test true false printf echo paste getopt mktemp pwd timeout uname kill; do
  [[ -e usr/bin/$each ]] && ln -s /usr/bin/$each tools/
done
cd cases
for case in *; do
  mkdir "$root/seen/$case"; chmod 777 "$root/seen/$case"
  find "$root/submit" "$root/home" "$root/tmp" "$root/image" -mindepth 1 -delete
  cp -r "$case/files/." "$root/submit/" 2> /dev/null || true
  mkdir -p "$root/submit/pt/bin"
  ln -s /stubs/stub "$root/submit/pt/bin/torchrun"
  ln -s /stubs/stub "$root/submit/pt/bin/python"
  chmod -R a+rwX "$root/submit"
  : > "$root/tmp/input"
  code=0
  (ulimit -t 10 -u 300 -f 20000 -v 4000000; exec env -i /usr/bin/timeout -k 1 ${LIMIT:-10} \
    "$chroot" --userspec=65534:65534 "$root" /usr/bin/bash -c '. "${0%slurm_script}start"' "/cases/$case/slurm_script") > "$root/seen/$case/out" 2>&1 < "$root/tmp/input" || code=$?
  for wait in {1..30}; do kill -0 -1 2> /dev/null || break; sleep 0.1; done  # what it leaves has a moment
  kill -KILL -1 2> /dev/null || true  # all that it left in this namespace
  echo $code > "$root/seen/$case/code"
done
tar -c -C "$root/seen" .
