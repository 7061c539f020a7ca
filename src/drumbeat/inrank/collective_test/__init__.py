"""The collective test that every rank runs, from a copy in the run folder; torch and the standard library, nothing of drumbeat.

In this order: a smoke test of the rank's GPU in a child that can be killed; rendezvous; pair tests; every collective over
swept sizes with every element of every result checked; the same matrix product on every rank. Reports of the ranks travel
over the rendezvous store, not over what is being tested, and rank 0 writes after each part, so that a run that dies in the
middle still tells how far it came. Imports are relative: the copy is a package of another name than this one.
"""
