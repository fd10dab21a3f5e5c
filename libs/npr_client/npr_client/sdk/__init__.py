"""The Python SDK: one asynchronous client, and a blocking one of the same shape for scripts and notebooks.

    async with NprClient.connect() as client:
        async for event in client.generate(text_prompt("What is 12 + 30?"), DecodingOptions()):
            ...

Invariants:
- every failure is an `NprError` that says what to do; no gRPC error leaves the SDK;
- calls outlive a service's restart: they wait, up to the client's patience, and then name whom they waited for;
- watching goes on where it was: no event is lost, none is told twice.
"""

from npr_client.sdk.addresses import ServiceAddresses
from npr_client.sdk.blocking import BlockingClient
from npr_client.sdk.client import NprClient
from npr_client.sdk.decoding import BranchShare, BudgetOptions, DecodingOptions, Exhaustion
from npr_client.sdk.policies import InFlight
from npr_client.sdk.prompts import prompts_from_jsonl, text_prompt

__all__ = [
    "BlockingClient",
    "BranchShare",
    "BudgetOptions",
    "DecodingOptions",
    "Exhaustion",
    "InFlight",
    "NprClient",
    "ServiceAddresses",
    "prompts_from_jsonl",
    "text_prompt",
]
