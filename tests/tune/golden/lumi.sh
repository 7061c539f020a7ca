#!/bin/bash
#SBATCH --job-name=llama-tune-batch
#SBATCH --account=project_465
#SBATCH --chdir=/project/465/code
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1                      # one agent per node; it starts the node's ranks
#SBATCH --cpus-per-task=56                       # cores of the node, for all its ranks
#SBATCH --gpus-per-node=8                        # all ranks see all GPUs of their node: --gpus-per-task would hide peers
#SBATCH --mem=480G                               # of each node
#SBATCH --time=00:20:00                          # days-hours:minutes:seconds
#SBATCH --signal=B:USR2@35                       # 35 s before the end; B: to this script alone, or every process would get it
#SBATCH --no-requeue                             # started again it would begin with its first run
#SBATCH --open-mode=append                       # a job that comes back must not overwrite what it wrote
#SBATCH --output=/project/465/code/runs/llama-tune-batch-20231114-221320-dd56/slurm-%j.out
#SBATCH --partition=standard-g                   # whole GPU nodes; small-g and dev-g share them

# Written by drumbeat 0.1.0: `drumbeat tune --submit` sends exactly this file.
BASE=/project/465/code/runs/llama-tune-batch-20231114-221320-dd56
module load LUMI || exit 78
# Run the very drumbeat.pyz and the very request that were submitted, from private copies: days may pass until this
# starts, and others may be able to write to the run folder.
LOADER='import _signal, fcntl, hashlib, os, stat, sys, time

def end(code, words):
    sys.stderr.write("drumbeat: " + words + "\n")
    sys.exit(code)

def checked(path, digest):
    with open(path, "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != digest:
        end(78, path + " was changed after the job was submitted, so it is not run: submit the job again")
    return data

def replaceable(folder):
    while True:
        found = os.stat(folder)
        others = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if others or found.st_uid not in (os.geteuid(), 0):
            return True
        if folder == os.sep:
            return False
        folder = os.path.dirname(folder)

def remove(folder):
    import shutil
    shutil.rmtree(folder, ignore_errors=True)

def private_copies(files):
    chosen = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    usable = [folder for folder in chosen + ["/tmp", "/var/tmp", "/dev/shm"] if folder and os.access(folder, os.W_OK | os.X_OK)]
    safe = [folder for folder in usable if not replaceable(os.path.realpath(folder))]
    failed = OSError("no folder for temporary files can be written: set TMPDIR")
    for folder in safe or usable:
        for name in os.listdir(folder):
            if name.startswith("drumbeat-node-"):  # a start that was killed outright left its own
                old = os.path.join(folder, name)
                found = hold(old, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found and found.st_uid == os.geteuid() and found.st_mtime < time.time() - 3600:
                    remove(old)
        made = os.path.join(os.path.abspath(folder), "drumbeat-node-" + os.urandom(8).hex())
        try:
            os.mkdir(made, 0o700)
            hold(made, fcntl.LOCK_SH)
            for name, data in files.items():
                with open(os.path.join(made, name), "wb") as file:
                    file.write(data)
            return made
        except OSError as error:  # it is full
            remove(made)
            failed = error
    raise failed

def hold(folder, how):
    try:
        file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        os.set_inheritable(file, how == fcntl.LOCK_SH)  # kept by the program
        fcntl.flock(file, how)
        return os.fstat(file)
    except OSError:
        return None  # it is in use, or another user'"'"'s

word, request, digest, program = sys.argv[1:]
name = os.path.basename(request)
_signal.pthread_sigmask(_signal.SIG_BLOCK, [2, 15, 1, 12, 3])  # heard when the private copies can be removed
try:
    bundle = os.path.join(os.path.dirname(request), "drumbeat.pyz")
    private = private_copies({name: checked(request, digest), "drumbeat.pyz": checked(bundle, program)})
except OSError as error:
    end(74, str(error))
words = [os.path.join(private, "drumbeat.pyz"), word, os.path.join(private, name), private]
os.execv(sys.executable, [sys.executable, "-I", "-S"] + words)'
python3 -I -S -c "$LOADER" _tune "$BASE/request.json" SHA256-OF-THE-REQUEST  &
desk=$!
# it ends the run that goes on, keeps what it knows, and is waited for
trap 'kill -USR2 $desk' USR2
trap 'kill -TERM $desk' TERM
wait $desk; code=$?
while kill -0 $desk 2>/dev/null; do wait $desk; code=$?; done  # a trap ends a wait early
exit $code
