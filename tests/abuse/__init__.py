"""``make abuse``: what people who mean harm would send, under the chart's limits, next to clients who mean well.

``abuse/kit`` has a deployment to attack (real Redis, scheduler, gateway, each under a memory limit; an attention worker
without torch), honest clients who verify each token, and a watch over memory, descriptors and probes. ``abuse/attacks``
has the attacks: each one runs alone (``test_attacks.py``) and, with all others, for minutes (``python -m abuse.soak``).
``python -m abuse.crowds`` brings thousands of clients that do nothing, ``python -m abuse.pauses`` stops each role.
"""
