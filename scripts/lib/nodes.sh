# shellcheck shell=bash disable=SC2034,SC2154 # variables are set and read across the files that are sourced
# Sourced by run_master_gpt.sh and run_worker_gpt.sh: which nodes there are, which one this is, how they meet.

source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

node_ips='' multi_node=false node_rank='' master_addr='' master_port=29500
elastic=false nnodes='' rdzv_endpoint='' rdzv_id='' nodes=()

nodes_usage='  --node-ips A,B,C  addresses or names of the nodes in rank order, the same list on every node
  --multi-node      insist on more than one node
  --master-addr A   where the nodes meet (default: the first of --node-ips); --master-port P (default: 29500)
  --elastic         nodes may join and leave: torchrun starts the ranks anew when one does; with
  --nnodes MIN:MAX      how many nodes (default: 1 to those of --node-ips)
  --rdzv-endpoint A[:P] where they meet (default: the master address and port)
  --rdzv-id NAME        one name a job, the same on every node (default: megascan)'

take_node_option() { # as take_option
    taken=1
    case $1 in
    --multi-node) multi_node=true && return ;;
    --elastic) elastic=true && return ;;
    esac
    taken=2
    case $1 in
    --node-ips) take_text node_ips "$@" ;;
    --master-addr) take_text master_addr "$@" ;;
    --master-port) need_value "$@" && need_whole "$1" "$2" 1 65535 && master_port=$2 ;;
    --nnodes) take_text nnodes "$@" ;;
    --rdzv-endpoint) take_text rdzv_endpoint "$@" ;;
    --rdzv-id) take_text rdzv_id "$@" ;;
    *) take_option "$@" ;;
    esac
}

read_nodes() { # checks the node options and fills `nodes`
    local node seen=()
    [[ -z $node_ips || ! $node_ips =~ (^,|,,|,$|[[:space:]]) ]] ||
        fail "--node-ips is '$node_ips', expected addresses with a comma between them, for example 10.0.0.1,10.0.0.2" 2
    IFS=, read -ra nodes <<<"$node_ips"
    for node in "${nodes[@]}"; do
        need_address --node-ips "$node"
        ! is_one_of "$node" "${seen[@]}" || fail "--node-ips names $node twice; name each node once, in rank order" 2
        seen+=("$node")
    done
    [[ -z $master_addr ]] || need_address --master-addr "$master_addr"
    if $elastic; then read_elastic; else read_fixed; fi
    find_range
    ! $multi_node || ((highest_nodes > 1)) ||
        fail "--multi-node needs --node-ips with two nodes or more, got ${#nodes[@]}" 2
}

read_fixed() { # as many nodes as --node-ips has
    [[ -z $nnodes$rdzv_endpoint$rdzv_id ]] || fail "--nnodes, --rdzv-endpoint and --rdzv-id belong to --elastic; add it" 2
    ((max_restarts == 0 || ${#nodes[@]} < 2)) ||
        fail "--max-restarts on more than one node needs --elastic, which lets the nodes meet again" 2
    [[ -n $node_ips || -z $master_addr ]] || fail "--master-addr belongs to --node-ips; add it" 2
    [[ -n $node_ips ]] || node_ips=127.0.0.1 nodes=(127.0.0.1)
    master_addr=${master_addr:-${nodes[0]}}
}

read_elastic() { # a range of nodes, which meet at a place
    local place=$rdzv_endpoint port=$master_port
    [[ -z $rdzv_endpoint || -z $master_addr ]] || fail "--rdzv-endpoint and --master-addr exclude each other; keep one" 2
    [[ -n $node_ips$master_addr$rdzv_endpoint ]] ||
        fail "--elastic needs a place to meet: --rdzv-endpoint HOST:PORT, --master-addr, or --node-ips" 2
    [[ -n $node_ips$nnodes ]] || fail "--elastic needs --nnodes MIN:MAX where there is no --node-ips" 2
    [[ -n $node_ips || -z $node_rank ]] || fail "--node-rank is a place in --node-ips; give that too" 2
    if [[ $place =~ ^(\[.*\]|[^:]*):([^:]*)$ ]]; then # an IPv6 address has its port behind brackets
        place=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
        is_whole "$port" 1 65535 ||
            fail "--rdzv-endpoint is '$rdzv_endpoint', expected HOST:PORT with a port from 1 to 65535" 2
        place=${place#[} place=${place%]}
        need_address --rdzv-endpoint "$place"
    elif [[ -n $place ]]; then
        need_address --rdzv-endpoint "$place"
    fi
    master_addr=${place:-${master_addr:-${nodes[0]:-}}}
    rdzv_endpoint=$master_addr:$port rdzv_id=${rdzv_id:-megascan}
    [[ $master_addr != *:* ]] || rdzv_endpoint="[$master_addr]:$port"
}

need_address() { # option value: an IPv4 or IPv6 address, or a host name
    local name='^[0-9A-Za-z_]([0-9A-Za-z_.-]*[0-9A-Za-z_.])?$'
    if [[ $2 =~ ^[0-9.]+$ ]]; then
        ! is_ipv4 "$2" || return 0
    elif [[ $2 == *:*:* && $2 =~ ^[0-9A-Fa-f:.]+$ || $2 =~ $name ]]; then
        return 0
    fi
    fail "$1 holds '$2', expected an address like 10.0.0.1 or a host name" 2
}

is_ipv4() {
    local byte
    [[ $1 =~ ^([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})$ ]] || return 1
    for byte in "${BASH_REMATCH[@]:1}"; do ((10#$byte < 256)) || return 1; done
}

find_range() { # sets the lowest and the highest number of nodes
    if [[ -z $nnodes ]]; then
        nnodes=${#nodes[@]}
        ! $elastic || nnodes=1:$nnodes
    fi
    [[ $nnodes =~ ^[0-9]{1,5}(:[0-9]{1,5})?$ ]] || fail "--nnodes is '$nnodes', expected MIN:MAX, for example 1:4" 2
    lowest_nodes=${nnodes%:*} highest_nodes=${nnodes#*:}
    ((lowest_nodes >= 1 && lowest_nodes <= highest_nodes)) ||
        fail "--nnodes is '$nnodes', expected 1 node or more and the smaller number first" 2
}

find_own_places() { # the ranks in --node-ips that are addresses of this machine
    local i
    for i in "${!nodes[@]}"; do
        [[ -z $(interface_of "${nodes[i]}") ]] || echo "$i"
    done
}

own_addresses() { own_interfaces | awk '{ print $2 }' | paste -sd' '; }

choose_first_rank() { # of the master: node 0, unless the addresses tell otherwise
    local places
    node_rank=0
    mapfile -t places < <(find_own_places)
    if ((${#places[@]} == 0)); then
        [[ -n $given_meeting_place ]] ||
            fail "none of $node_ips is an address of this machine ($(own_addresses)); correct --node-ips, or say with --master-addr where the nodes reach it"
        note "none of $node_ips is an address of this machine ($(own_addresses)); it goes on as node 0"
    elif ((places[0] != 0)); then
        fail "this machine is node ${places[0]} of $node_ips; start scripts/run_worker_gpt.sh here, and this script on ${nodes[0]}"
    fi
}

choose_node_rank() { # of a worker: checks --node-rank, or finds it from this machine's addresses
    local places
    if [[ -n $node_rank ]]; then
        ((node_rank < ${#nodes[@]})) ||
            fail "--node-rank is $node_rank and --node-ips has ${#nodes[@]} nodes, 0 to $((${#nodes[@]} - 1))" 2
        return
    fi
    mapfile -t places < <(find_own_places)
    case ${#places[@]} in
    1) node_rank=${places[0]} ;;
    0) fail "none of $node_ips is an address of this machine ($(own_addresses)); correct --node-ips, or give --node-rank" ;;
    *) fail "nodes ${places[*]} of $node_ips are all this machine; say which one this is with --node-rank" ;;
    esac
}

need_meeting_place() { # wait until the place where the nodes meet has an address: a cluster's names may come late
    local attempt
    [[ -z $dry_run ]] || return 0
    for ((attempt = 0; attempt < 30; attempt++)); do
        [[ -z $(addresses_of "$master_addr") ]] || return 0
        ((attempt)) || note "$master_addr has no address yet; waiting a minute for one"
        sleep 2
    done
    fail "the nodes cannot meet at $master_addr: this machine finds no address of that name; correct --node-ips, --master-addr or --rdzv-endpoint"
}

plan_launch() { # fills `launcher`, and names the interface that carries the address in --node-ips
    local interface='' address=${nodes[node_rank]:-}
    [[ -z $address ]] || interface=$(interface_of "$address")
    plan_job "$lowest_nodes" "$highest_nodes"
    if $elastic; then
        [[ -n $save ]] || note "without --save DIR a restart begins again at iteration 1"
        launcher=(--nnodes "$nnodes" --nproc-per-node "$num_gpus" --max-restarts "$max_restarts"
            --rdzv-backend c10d --rdzv-endpoint "$rdzv_endpoint" --rdzv-id "$rdzv_id")
        [[ -z $interface ]] || launcher+=(--local-addr "$address")
        # A new store for each attempt: in torchrun's own, a node whose ranks did not fail themselves counts attempts
        # differently and would look for its peers where they were before.
        variables+=(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    else
        launcher=(--nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$num_gpus"
            --max-restarts "$max_restarts" --master-addr "$master_addr" --master-port "$master_port")
    fi
    if [[ -n $interface && $interface != - ]]; then
        variables+=(GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
            NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}")
    fi
}

say_next() { # is this the first node? What to type once all nodes are done
    $trace && [[ -z $dry_run ]] || return 0
    if ! $1; then
        echo "this node's rank files are in $trace_dir; the first node says what to type next"
        return
    fi
    say_how_to_judge
    ((highest_nodes == 1)) || printf 'unless the nodes share %q, first gather it: bash %q -o gathered %s\n' \
        "$trace_dir" "$root/scripts/collect_traces.sh" "$(sources)"
}

sources() { # HOST:DIR of every node, this one as a folder
    local node words folder
    folder=$(realpath -m -- "$trace_dir")
    printf -v words %q "$trace_dir"
    for node in "${nodes[@]:1}"; do words+=" $(printf %q "$node:$folder")"; done
    echo "$words$( ((${#nodes[@]} > 1)) || echo ' HOST:FOLDER…')"
}
