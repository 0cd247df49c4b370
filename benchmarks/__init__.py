"""Benchmarks of Halfstep's claims: one file per claim, each of which can be run by itself.

python -m benchmarks.recording          print the table
python -m benchmarks.recording --save   and keep it in benchmarks/results
python -m benchmarks                    all of them
"""
