"""Benchmarks as data: ``python -m benchmarks`` runs every case beside its baseline; writes a table, JSON and a plot.

Layout: ``cases.py`` what is measured, ``workloads.py`` the ids, ``engines.py`` what runs a step, ``timing.py`` the
clock, ``runner.py`` the loop, ``phases.py`` where the time goes, ``machine.py`` where it ran, ``report.py`` the output.
Another device adds cases, an engine and an entry of ``timing.TIMERS``.
"""
