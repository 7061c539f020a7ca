"""One rank of a real MPI program, without a compiler: MPI's own library by ctypes. Arguments: mpich or openmpi, and `abort` for a
rank 1 that ends the job as mpi4py does after an exception."""

import ctypes
import os
import sys

LIBRARY = {"mpich": "libmpich.so.12", "openmpi": "libmpi.so.40"}[sys.argv[1]]
lib = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
if sys.argv[1] == "mpich":  # its handles are numbers
    world, integer, total = 0x44000000, 0x4C000405, 0x58000003
else:
    names = ("ompi_mpi_comm_world", "ompi_mpi_int", "ompi_mpi_op_sum")
    world, integer, total = (ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(lib, name))) for name in names)
assert lib.MPI_Init(None, None) == 0
rank, size, added = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
lib.MPI_Comm_rank(world, ctypes.byref(rank))
lib.MPI_Comm_size(world, ctypes.byref(size))
lib.MPI_Allreduce(ctypes.byref(rank), ctypes.byref(added), 1, integer, total, world)
print(
    f"mpi {rank.value} of {size.value}, sum {added.value}; rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
    flush=True,
)
if "abort" in sys.argv and rank.value == 1:
    print("Traceback (most recent call last):\nValueError: no such sample", file=sys.stderr, flush=True)
    lib.MPI_Abort(world, 5)
lib.MPI_Finalize()
