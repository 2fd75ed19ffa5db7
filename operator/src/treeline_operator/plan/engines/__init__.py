"""How each engine is started: one adapter for each type of engine. A new one is a module here, a word in
`api.engine.EngineType`, and its column in `api.engine.SETTINGS`."""
