"""NeMo Gym's own counter server, from the package; runs in a Python that has it, and imports nothing of this project's but tests."""

from unittest.mock import MagicMock

from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer, StatefulCounterResourcesServerConfig

from tests.env_servers.serving import serve

if __name__ == "__main__":
    config = StatefulCounterResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="counter", domain="agent")
    serve(StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver())
