"""What Halfstep claims of itself, measured: one file a claim, each runs by itself.

python -m benchmarks.recording          print the table
python -m benchmarks.recording --save   and keep it in benchmarks/results
python -m benchmarks                    all of them
"""
