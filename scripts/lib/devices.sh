# shellcheck shell=bash
# Sourced: what this machine has: GPUs, addresses, interfaces.

count_gpus() { # those this process may use: nvidia-smi's, less what CUDA_VISIBLE_DEVICES hides
    local found=0 visible
    if command -v nvidia-smi >/dev/null; then
        found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    fi
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        visible=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[0-9GM]' || true)
        ((visible < found)) && found=$visible
    fi
    echo "$found"
}

own_interfaces() { # a line "interface address" for each address of this machine
    if command -v ip >/dev/null; then
        ip -o addr show | awk '$3 ~ /^inet6?$/ { sub("/.*", "", $4); print $2, $4 }'
    else
        hostname -I | tr ' ' '\n' | sed -n 's/..*/- &/p'
    fi
}

addresses_of() { # host name or address
    getent ahosts "$1" 2>/dev/null | awk '{ print $1 }' | sort -u || true
}

interface_of() { # the interface that has an address of this host name; empty when none has
    local wanted
    wanted=$(echo "$1" && addresses_of "$1")
    own_interfaces | awk -v wanted="$wanted" '
        BEGIN { split(wanted, lines, "\n"); for (i in lines) is_wanted[lines[i]] = 1 }
        is_wanted[$2] && !found { found = 1; print $1 }'
}

is_port_taken() { # address port: does something answer there, or at the loopback, if the address is of this machine
    answers 127.0.0.1 "$2" || { [[ -n $(interface_of "$1") ]] && answers "$1" "$2"; }
}

answers() { # address port
    # shellcheck disable=SC2016 # the inner bash has the two words
    timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null
}
