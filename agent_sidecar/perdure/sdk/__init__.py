"""The SDK for agent authors. Its public names are exported by ``perdure``.

Flow of one operation: a decorated function or a method of ``Run`` claims its redo identity (``identity``) in the scope it runs in
(``here``), looks into the journal, and commits through ``execution`` and a ``transport``; waits go through ``waits``, tool calls through
``activities``. ``agents`` runs one attempt; ``serve`` and ``forkserver`` make it a process.
"""
