"""Benchmarks as data: ``python -m benchmarks`` runs every case beside its baseline; writes a table, JSON and a plot.

Layout: ``cases.py`` what is measured, ``workloads.py`` the ids, ``engines.py`` what runs a step, ``graphs.py`` the same
in a CUDA graph, ``timing.py`` the clock, ``runner.py`` the loop, ``phases.py`` where the time goes, ``machine.py``
where it ran, ``report.py`` and ``plot.py`` the output.
"""
