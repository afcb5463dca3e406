"""The words that all parts share: ids, errors, units, jobs, plans, profiles, messages.

Data and checks only. Imports nothing else of ours; everything else may import it.
"""
