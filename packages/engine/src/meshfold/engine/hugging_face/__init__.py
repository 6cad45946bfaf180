"""Hugging Face models: folders read and written tensor by tensor under any spec, adapters, four bits, its Trainer."""
