"""Personalised models tied by a graph of similar sites: functions on arrays.

Source: Zhao, Liu, Jiang, He, "Communication Efficient Training of Federated Model Over
Unbalanced Labels" (draft). Each module says what the draft leaves open, and what it
corrects.
"""
