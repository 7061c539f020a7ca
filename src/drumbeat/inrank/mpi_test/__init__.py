"""The MPI test that runs in the ranks of `drumbeat verify --mpi`. It needs mpi4py and nothing of drumbeat."""
