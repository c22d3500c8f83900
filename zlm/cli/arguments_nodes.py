"""The flags of serve that spread one engine over several machines: a group of ``arguments``."""

from zlm.cli import values
from zlm.cli.argument import Argument
from zlm.config_parallel import EXECUTORS

NODES = (
    Argument(
        flag="--nnodes",
        field="parallel.nnodes",
        metavar="N",
        parse=values.integer,
        spellings=("-n",),
        help="machines that have the workers together, each as many",
    ),
    Argument(
        flag="--node-rank",
        field="parallel.node_rank",
        metavar="N",
        parse=values.integer,
        spellings=("-r",),
        help="which of them this is; node 0 has the rest of the server, too",
    ),
    Argument(
        flag="--master-addr",
        field="parallel.master_addr",
        metavar="HOST",
        parse=values.text,
        help="node 0's name or IP address, as the others see it",
        default="none",
    ),
    Argument(
        flag="--master-port",
        field="parallel.master_port",
        metavar="PORT",
        parse=values.integer,
        help="first of three ports of node 0 for the other nodes",
    ),
    Argument(
        flag="--cluster-key",
        field="parallel.cluster_key_file",
        metavar="FILE",
        parse=values.file,
        help="file with a secret that all nodes share; also $ZLM_CLUSTER_KEY",
        default="none",
    ),
    Argument(
        flag="--distributed-executor-backend",
        field="parallel.executor",
        metavar="NAME",
        parse=values.choice(*EXECUTORS),
        help="ray: the other nodes are machines of Ray's cluster, as many as it takes",
    ),
    Argument(
        flag="--headless",
        field="parallel.headless",
        help="may be said of nodes other than 0: they answer no HTTP",
    ),
)
