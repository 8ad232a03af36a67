"""The documented import path of admission strategies and counters."""

from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter, ProbabilityAdmissionStrategy
from dynamicemb.types import AdmissionStrategy, Counter

__all__ = [
    "AdmissionStrategy",
    "Counter",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilityAdmissionStrategy",
]
