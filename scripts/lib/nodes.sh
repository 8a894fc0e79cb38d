# shellcheck shell=bash disable=SC2034,SC2154 # variables are set and read across the files that are sourced
# Sourced by run_master_gpt.sh and run_worker_gpt.sh: which nodes there are, which one this is, how they meet.

source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

node_ips='' multi_node=false node_rank='' master_addr='' master_port=29500
elastic=false nnodes='' rdzv_endpoint='' rdzv_id=megascan nodes=()

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
    local node
    [[ -z $node_ips || ! $node_ips =~ (^,|,,|,$|[[:space:]]) ]] ||
        fail "--node-ips is '$node_ips', expected addresses with a comma between them, for example 10.0.0.1,10.0.0.2" 2
    IFS=, read -ra nodes <<<"$node_ips"
    for node in "${nodes[@]}"; do
        [[ $node =~ ^[0-9A-Za-z_.:-]+$ ]] || fail "--node-ips holds '$node', expected an address or a host name" 2
    done
    if $elastic; then
        [[ -n $node_ips$rdzv_endpoint ]] ||
            fail "--elastic needs a place to meet: --rdzv-endpoint HOST:PORT, or --node-ips" 2
        [[ -n $node_ips$nnodes ]] || fail "--elastic needs --nnodes MIN:MAX where there is no --node-ips" 2
    else
        [[ -z $nnodes$rdzv_endpoint ]] || fail "--nnodes and --rdzv-endpoint belong to --elastic; add it" 2
        ((max_restarts == 0 || ${#nodes[@]} < 2)) ||
            fail "--max-restarts on more than one node needs --elastic, which lets the nodes meet again" 2
        ! $multi_node || ((${#nodes[@]} > 1)) ||
            fail "--multi-node needs --node-ips with two nodes or more, got ${#nodes[@]}" 2
        [[ -n $node_ips ]] || node_ips=127.0.0.1 nodes=(127.0.0.1)
    fi
    master_addr=${master_addr:-${nodes[0]:-}}
    find_range
}

find_range() { # sets the lowest and the highest number of nodes
    nnodes=${nnodes:-$($elastic && echo "1:${#nodes[@]}" || echo "${#nodes[@]}")}
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

choose_node_rank() { # checks --node-rank, or finds it from this machine's addresses
    local places
    if [[ -n $node_rank ]]; then
        ((node_rank < ${#nodes[@]})) || fail "--node-rank is $node_rank and --node-ips has ${#nodes[@]} nodes" 2
        return
    fi
    mapfile -t places < <(find_own_places)
    case ${#places[@]} in
    1) node_rank=${places[0]} ;;
    0) fail "none of $node_ips is an address of this machine ($(own_interfaces | awk '{ print $2 }' | tr '\n' ' ')); correct --node-ips, or give --node-rank" ;;
    *) fail "nodes ${places[*]} of $node_ips are all this machine; say which one this is with --node-rank" ;;
    esac
}

plan_launch() { # fills `launcher`, and names the interface that carries the address in --node-ips
    local interface='' address=${nodes[node_rank]:-}
    [[ -z $address ]] || interface=$(interface_of "$address")
    plan_job "$lowest_nodes" "$highest_nodes"
    if $elastic; then
        [[ -n $save ]] || note "without --save DIR a restart begins again at iteration 1"
        rdzv_endpoint=${rdzv_endpoint:-$master_addr}
        [[ $rdzv_endpoint == *:* ]] || rdzv_endpoint+=:$master_port
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
    echo "next, name the slow rank: $PYTHON $root/aggregate.py -b $trace_dir -d"
    ((highest_nodes == 1)) ||
        echo "unless the nodes share $trace_dir, first gather it: bash $root/scripts/collect_traces.sh -o gathered $(sources)"
}

sources() { # HOST:DIR of every node, this one as a folder
    local node words
    printf -v words '%q' "$trace_dir"
    for node in "${nodes[@]:1}"; do words+=" $node:$(printf %q "$(realpath -m "$trace_dir")")"; done
    echo "$words$( ((${#nodes[@]} > 1)) || echo ' HOST:FOLDER…')"
}
