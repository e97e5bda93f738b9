"""The bundled adapters: one file a kernel library, one `Adapter` a kernel, gathered in each file's `ADAPTERS`."""
