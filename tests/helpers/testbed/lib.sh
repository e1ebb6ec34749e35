# shellcheck shell=bash
# lib.sh - settings and helpers shared by netns_*.sh and slurm_*.sh.  Source it.
#
# Everything made lives under $DC_STATE or carries the name prefix $DC_PREFIX,
# so two copies can run side by side if DC_STATE, DC_PREFIX and DC_NET differ.

DC_STATE=${DC_STATE:-/run/dctest}   # pid files, logs, configuration, munge key
DC_PREFIX=${DC_PREFIX:-dc}          # bridge, veth and netns name prefix (<= 8 characters)
DC_NET=${DC_NET:-10.77.0}           # first three octets of a private /24
DC_HOSTS=${DC_HOSTS:-3}             # number of hosts
DC_HOST_NAME=${DC_HOST_NAME:-node}  # hosts are called node1, node2, ...
DC_BRIDGE=${DC_PREFIX}br0
# shellcheck disable=SC2034
DC_GATE=$DC_NET.254                 # the machine's own address on the bridge ("login" host)

say()  { printf '%s\n' "$*" >&2; }
die()  { say "error: $*"; exit 1; }
need() { local c; for c in "$@"; do command -v "$c" >/dev/null || die "needs the command '$c'"; done; }
now_ms() { date +%s%3N; }

# One up/down at a time.  The lock's descriptor (9) must not leak into daemons:
# start those with 9>&-.
lock() {
    mkdir -p "$DC_STATE"
    exec 9>"$DC_STATE.lock"
    flock -w 60 9 || die "another up/down is running (lock $DC_STATE.lock)"
}

# ---- processes -------------------------------------------------------------
# A pid file holds "PID STARTTIME".  The start time (field 22 of /proc/PID/stat)
# guards against killing an unrelated process that got a reused pid.
start_time() {
    local s
    s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    s=${s##*) }                      # drop "pid (comm) ": comm may hold blanks
    # shellcheck disable=SC2086
    set -- $s
    [ "$1" != Z ] || return 1        # a zombie is not running (pid 1 may reap late)
    printf '%s' "${20}"
}
record_pid() { printf '%s %s\n' "$2" "$(start_time "$2")" >"$1"; }        # FILE PID
recorded_alive() {                                                        # FILE -> prints the pid
    local pid st
    read -r pid st 2>/dev/null <"$1" || return 1
    [ -n "$st" ] && [ "$(start_time "$pid")" = "$st" ] || return 1
    printf '%s' "$pid"
}
# stop FILE [SECONDS]: TERM, wait, then KILL; removes the file.
stop_recorded() {
    local pid i n=$(( ${2:-5} * 20 ))
    if pid=$(recorded_alive "$1"); then
        kill -TERM "$pid" 2>/dev/null || true
        for ((i = 0; i < n; i++)); do
            recorded_alive "$1" >/dev/null || break
            sleep 0.05
        done
        if recorded_alive "$1" >/dev/null; then kill -KILL "$pid" 2>/dev/null || true; fi
        for ((i = 0; i < 100; i++)); do
            recorded_alive "$1" >/dev/null || break
            sleep 0.05
        done
    fi
    rm -f "$1"
}
# wait_for SECONDS CMD...: until CMD succeeds.
wait_for() {
    local end=$(( $(now_ms) + $1 * 1000 )); shift
    until "$@"; do
        [ "$(now_ms)" -lt "$end" ] || return 1
        sleep 0.05
    done
}

# ---- hosts -----------------------------------------------------------------
host_dir()  { printf '%s/host%s' "$DC_STATE" "$1"; }
host_ns()   { printf '%s%s' "$DC_PREFIX" "$1"; }        # name for `ip netns`
host_veth() { printf '%sv%s' "$DC_PREFIX" "$1"; }       # the switch side of host N's cable
host_pid()  { recorded_alive "$(host_dir "$1")/init.pid"; }
# accepts "2" or "node2"
host_index() {
    local i=${1#"$DC_HOST_NAME"}
    case $i in ''|*[!0-9]*) die "no such host: $1";; esac
    [ "$i" -ge 1 ] && [ "$i" -le "$DC_HOSTS" ] || die "no such host: $1"
    printf '%s' "$i"
}
# on_host N CMD...: runs CMD inside host N (all its namespaces), in the same
# directory.  --pdeathsig: nsenter --pid has to fork, and does not pass signals
# on; so if nsenter is ended, its child gets SIGTERM.
on_host() {
    local pid n=$1 clock=(); shift
    pid=$(host_pid "$n") || die "host $n is not up"
    [ ! -e "$(host_dir "$n")/clock" ] || clock=(--time)
    nsenter --target "$pid" --net --uts --ipc --pid --mount "${clock[@]}" --wdns="$PWD" -- \
        setpriv --pdeathsig TERM -- "$@"
}

# host_start N: makes host N and connects it to the switch (see netns_up.sh, which
# must have made the switch and $DC_STATE/init.sh).
host_start() {
    local i=$1 d ns v outer inner clock=()
    d=$(host_dir "$i"); ns=$(host_ns "$i"); v=$(host_veth "$i")
    mkdir -p "$d"; rm -f "$d/ready" "$d/clock"
    # Linux 5.6 and util-linux 2.38 can; without, all hosts have this machine's clock.
    if unshare --time --monotonic 3600 true 2>/dev/null; then
        clock=(--time --monotonic "$((3600 * i))")
        : >"$d/clock"
    fi
    # unshare --fork: its child is process 1 of the new pid namespace.
    # --kill-child: should this unshare end, so does the host.
    setsid unshare --net --uts --ipc --mount --pid "${clock[@]}" --fork --kill-child --mount-proc \
        bash "$DC_STATE/init.sh" "$DC_HOST_NAME$i" "$DC_STATE" "$d" \
        </dev/null >"$d/init.log" 2>&1 9>&- &
    outer=$!
    wait_for 10 test -e "$d/ready" || { cat "$d/init.log" >&2; die "host $i did not start"; }
    inner=$(cat "/proc/$outer/task/$outer/children"); inner=${inner%% *}
    record_pid "$d/outer.pid" "$outer"
    record_pid "$d/init.pid" "$inner"
    # A name in /run/netns, so that `ip netns exec dc1 ...` and `ip -n dc1 ...` work.
    ip netns attach "$ns" "$inner"
    # The cable.
    ip link add "$v" type veth peer name eth0 netns "$ns"
    ip -n "$ns" addr add "$DC_NET.$i/24" dev eth0
    ip -n "$ns" link set eth0 up
    ip link set "$v" master "$DC_BRIDGE"
    ip link set "$v" up
}
# host_stop N: as when the power goes.  The cable first, so that the dying
# processes' sockets cannot tell their peers (no FIN, no RST): those see silence.
host_stop() {
    local d pid ns v
    d=$(host_dir "$1"); ns=$(host_ns "$1"); v=$(host_veth "$1")
    ip link del "$v" 2>/dev/null || true
    # Its further cables (netns_host.sh cable): another testbed, made meanwhile, keeps the namespace.
    for v in $(ip -o link show type veth | awk -F': ' '{print $2}' | cut -d@ -f1 | grep -E "^${DC_PREFIX}eth[0-9]$1\$"); do
        ip link del "$v"
    done
    stop_recorded "$d/slow.pid"                          # see netns_host.sh slow
    ip link del "${DC_PREFIX}s$1" 2>/dev/null || true
    if pid=$(recorded_alive "$d/init.pid"); then
        kill -KILL "$pid" || true        # ends all processes of its pid namespace
        wait_for 10 eval "! recorded_alive '$d/init.pid' >/dev/null" || say "warning: $d: init is still there"
    fi
    rm -f "$d/init.pid"
    stop_recorded "$d/outer.pid"
    ip netns del "$ns" 2>/dev/null || true
    rm -rf "$d"
}
