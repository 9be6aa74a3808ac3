"""The command `skip-attn`. Its libraries come with the extra `cli`; without them it says so."""


def main() -> None:
    try:
        import matplotlib  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"skip-attn needs {error.name}: pip install 'skip_attn_compile[cli]'") from None
    from skip_attn_compile.commands import app

    app()
