"""Native fork and join for SGLang, as a plug-in of the unmodified server.

A request of the server is one stream of tokens: the trunk up to a fork, one branch, or the trunk from a join on. What
it may see is told by its `Context` (`contract.py`): blocks of branches in the server's prefix cache. The plug-in

- puts the cached keys and values of all branches in line, without copying any, and keeps them from being evicted while
  they are used (`cache.py`, a radix-cache backend of the server);
- gives what follows a join its RoPE positions, those behind the longest branch (`hooks.py`);
- writes the keys and values of a branch's last token before the branch ends, so that it can be joined at once
  (`hooks.py`);
- draws tokens by the rules of `npr_sampling`, as the engine does (`sampler.py`).

What differs between releases of SGLang is in `releases/`; all else is the same for each of them.

`contract.py` imports nothing but the standard library: clients use it too.
"""
