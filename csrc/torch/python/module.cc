#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <thread>

#include "base/config.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/text.h"
#include "group/device/device_pools.h"
#include "group/device/device_wait.h"
#include "group/device_explain.h"
#include "group/plan/device_plan.h"
#include "group/plan/simulate.h"
#include "kernel/cpu/flag_round.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/device_arena.h"
#include "net/messenger.h"
#include "net/tcp/job_key.h"
#include "net/ucx/ucx.h"
#include "net/ucx/ucx_search.h"
#include "torch/backend.h"
#include "torch/communicator.h"
#include "torch/core/argument_error.h"
#include "torch/core/hook.h"
#include "torch/core/interrupt.h"
#include "torch/core/tool_range.h"
#include "torch/python/inspect.h"
#include "torch/reconfigure/reconfigurable.h"
#include "torch/symmetric/allocator.h"

namespace nvx {
namespace {

namespace py = pybind11;
using namespace py::literals;

const std::string kTorchVersion = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR);

template <class T, class... Bases>
using Class = py::class_<T, c10::intrusive_ptr<T>, Bases...>;

kernel::Collective collective_of(const std::string& called) {
  std::vector<std::string> known;
  for (int c = int(kernel::Collective::kAllReduce); c <= int(kernel::Collective::kBarrier); ++c) {
    const char* one = name(kernel::Collective(c));
    if (called == one) return kernel::Collective(c);
    known.push_back(one);
  }
  C10_THROW_ERROR(ValueError, "nvx: there is no collective " + called + "; there are " + joined(known));
}

/// Facts of a group of processes like this one, spread evenly over hosts.
PlanFacts facts_of_some(size_t ranks, size_t hosts) {
  constexpr size_t kMost = 1 << 20;
  TORCH_CHECK_VALUE(ranks >= 1, "nvx: ranks must be at least 1");
  TORCH_CHECK_VALUE(ranks <= kMost, "nvx: more than ", kMost, " ranks");
  TORCH_CHECK_VALUE(hosts >= 1 && hosts <= ranks, "nvx: ", ranks, " ranks on ", hosts, " hosts: each needs one");
  std::vector<Hello> hellos(ranks, describe_self(0));
  for (size_t r = 0; r < ranks; ++r) {
    hellos[r].rank = int32_t(r);
    hellos[r].host = r * hosts / ranks;
  }
  try {
    return facts_of(Topology::from(std::move(hellos)), 0, tuning_of());
  } catch (const Error& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
}

std::string explain_choice(const std::string& collective, size_t bytes, size_t ranks, size_t hosts) {
  return explain(collective_of(collective), bytes, facts_of_some(ranks, hosts));
}

py::list listed(const std::vector<Way>& ways) {
  py::list list;
  for (const Way& way : ways) {
    const Estimate& estimate = way.estimate;
    const bool known = estimate.seconds > 0;
    const auto if_known = [&](auto value) { return known ? py::cast(value) : py::none(); };
    list.append(py::dict("by"_a = way.by, "algorithm"_a = way.what, "why"_a = way.why, "set_by"_a = way.set_by,
                         "runs"_a = way.runs, "estimate_us"_a = if_known(estimate.seconds * 1e6),
                         "steps"_a = if_known(estimate.steps), "bytes"_a = if_known(estimate.bytes),
                         "basis"_a = estimate.basis));
  }
  return list;
}

/// rdma_gb_s: of the port between hosts; 0: TCP.
Medium medium_of(double rdma_gb_s) { return rdma_gb_s > 0 ? rdma(rdma_gb_s) : tcp(); }

/// For CPU tensors. cores, l3_bytes: of another machine; 0: of this one.
py::list ways_on_cpu(const std::string& collective, size_t bytes, size_t ranks, size_t hosts, double rdma_gb_s,
                     size_t cores, size_t l3_bytes) {
  PlanFacts facts = facts_of_some(ranks, hosts);
  if (cores) facts.cores = cores;
  if (l3_bytes) facts.l3_bytes = l3_bytes;
  return listed(ways_of(collective_of(collective), bytes, facts, medium_of(rdma_gb_s)));
}

/// Hosts like this one, with a core for each rank.
py::dict simulate_on(const std::string& collective, size_t bytes, size_t hosts, size_t ranks_per_host, double inside,
                     double between, double latency, size_t cards) {
  TORCH_CHECK_VALUE(hosts >= 2, "nvx: --hosts must be at least 2, not ", hosts);
  TORCH_CHECK_VALUE(inside > 0, "nvx: --intra must be above 0, not ", inside);
  TORCH_CHECK_VALUE(between > 0, "nvx: --inter must be above 0, not ", between);
  TORCH_CHECK_VALUE(latency >= 0, "nvx: --latency must be at least 0, not ", latency);
  TORCH_CHECK_VALUE(cards >= 1 && cards <= ranks_per_host, "nvx: --cards must be 1 to --ranks-per-host (",
                    ranks_per_host, "), not ", cards);
  PlanFacts facts = facts_of_some(hosts * ranks_per_host, hosts);
  facts.cores = std::max(facts.cores, ranks_per_host);
  const kernel::Collective what = collective_of(collective);
  const std::optional<Simulation> s = simulate(what, bytes, facts, {inside, between, latency, cards});
  TORCH_CHECK_VALUE(s, "nvx: too many messages to simulate: choose fewer hosts or bytes");
  return py::dict("schedule"_a = plan_between(across(what), bytes, facts).row->name, "slices"_a = s->slices,
                  "seconds"_a = s->seconds, "inside_bytes"_a = s->inside_bytes, "between_bytes"_a = s->between_bytes,
                  "all_bytes"_a = s->all_bytes, "inside_seconds"_a = s->inside_seconds,
                  "between_seconds"_a = s->between_seconds);
}

DeviceLink link_here() {
  const py::gil_scoped_release release;
  return slowest_link(query_gpus());
}

/// For CUDA tensors, in the order in which the paths are tried.
py::list ways_on_device(const std::string& collective, size_t bytes, size_t ranks, size_t hosts,
                        const std::string& no_nccl, double rdma_gb_s) {
  const ExplainRequest request{collective_of(collective), bytes,   facts_of_some(ranks, hosts),
                               kernel::built_with_cuda(), no_nccl, link_here(),
                               medium_of(rdma_gb_s)};
  return listed(explain_on_device(request));
}

/// The resources of a GPU that a group's kernels take: the blocks while a collective runs, the memory as long as the
/// group lives. Of a process's first group; later ones may get less.
py::dict taken_on_device(size_t ranks) {
  const PlanFacts facts = facts_of_some(ranks, 1);
  const kernel::DeviceShape shape =
      device_shape(uint32_t(ranks), uint32_t(facts.tuning.of(Tune::kBlocks, ranks, link_here().kind)),
                   pad_budget(DeviceRegistry::kArenaBytes - DeviceArena::kForMessages, facts.tuning), facts.tuning);
  if (!shape.is_valid()) return {};
  return py::dict("blocks"_a = shape.blocks, "threads"_a = kernel::kLanes,
                  "registers"_a = kernel::kRegisters / kernel::kLanes,
                  "gpu_bytes"_a = kernel::DevicePad{shape}.bytes() + kernel::DeviceState{shape}.bytes(),
                  "pinned_bytes"_a = kernel::control_bytes(shape.ranks));
}

/// One dict per key of `NVX_TUNE`. Those of GPUs are for the slowest link between this machine's.
py::list tuning(size_t ranks, size_t hosts) {
  const PlanFacts facts = facts_of_some(ranks, hosts);
  const GpuLink gpus = link_here().kind;
  py::list rows;
  for (const TuneRow& row : tune_rows()) {
    const std::string link = row.link + (row.is_of_gpus() ? std::string(", ") + name(gpus) : "");
    rows.append(py::dict("key"_a = row.name, "link"_a = link, "value"_a = tuned(row.key, facts, gpus),
                         "set_by"_a = name(facts.tuning.set_by(row.key)), "least"_a = row.least, "most"_a = row.most,
                         "multiple"_a = row.multiple, "meaning"_a = row.meaning));
  }
  return rows;
}

/// (name, default with its effect, meaning, accepted values, why the current value is invalid).
std::vector<std::array<std::string, 5>> config_table() {
  (void)config();  // warns of invalid values
  std::vector<std::array<std::string, 5>> rows;
  for (const Variable& v : variables()) rows.push_back({v.name, default_of(v), v.meaning, accepted(v), fault(v)});
  return rows;
}

/// (name, likely intended name).
std::vector<std::pair<std::string, std::string>> config_unknown() {
  std::vector<std::pair<std::string, std::string>> unknown;
  for (const UnknownVariable& one : unknown_variables()) unknown.emplace_back(one.name, one.hint);
  return unknown;
}

py::dict build_info() {
  return py::dict("version"_a = NVX_VERSION, "torch"_a = kTorchVersion, "compiler"_a = NVX_COMPILER,
                  "build_type"_a = NVX_BUILD_TYPE, "cuda"_a = kernel::built_with_cuda(),
                  "ucx"_a = net::built_with_ucx(), "nvtx"_a = built_with_nvtx(), "cpu_level"_a = kernel::level().name);
}

ProcessGroupNVX& nvx_of(const c10::intrusive_ptr<c10d::Backend>& backend, const char* called) {
  auto* const found = dynamic_cast<ProcessGroupNVX*>(backend.get());
  const std::string name = backend ? backend->getBackendName() : "none";
  TORCH_CHECK_VALUE(found, called, ": the backend of this group is ", name, ", not nvx");
  return *found;
}

void set_timeout(const c10::intrusive_ptr<c10d::Backend>& backend, std::chrono::milliseconds timeout) {
  nvx_of(backend, "nvx.set_timeout").setTimeout(timeout);
}

/// {grown, used, mapped by rank, direct}, or None if no kernels serve the group.
py::object pool_stats(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const std::optional<PoolStats> stats = nvx_of(backend, "nvx.pool_stats").pool_stats();
  if (!stats) return py::none();
  return py::dict("grown"_a = stats->grown, "used"_a = stats->used, "mapped"_a = stats->mapped,
                  "direct"_a = stats->direct);
}

py::object mem_allocator() {
  return py::module_::import("nvx.pool").attr("allocator")(c10::DeviceTypeName(kernel_device(), /*lower_case=*/true));
}

/// by_torch: the options' global ranks are this group's. Those of a program may be of a group whose options it reuses.
template <class Group>
auto init_group() {
  return py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     const c10::intrusive_ptr<ProcessGroupNVX::Options>& options, bool by_torch) {
    // A call_guard would keep the GIL released while pybind11 registers the object.
    const py::gil_scoped_release unlocked;
    const auto own = options ? c10::make_intrusive<ProcessGroupNVX::Options>(*options)
                             : c10::make_intrusive<ProcessGroupNVX::Options>();
    own->ranks_unknown = !by_torch;
    if (!by_torch) own->global_ranks_in_group.clear();
    return c10::make_intrusive<Group>(store, rank, size, own);
  });
}

void define_group(Class<ProcessGroupNVX, c10d::Backend>& group) {
  group
      .def_property_readonly(
          "options",
          [](ProcessGroupNVX& self) {
            py::gil_scoped_release unlocked;  // the GIL is taken last, or alone
            return c10::dynamic_intrusive_pointer_cast<ProcessGroupNVX::Options>(self.getBackendOptions());
          })
      .def("get_error", &ProcessGroupNVX::getError, py::call_guard<py::gil_scoped_release>())
      .def("_set_default_timeout", &ProcessGroupNVX::setTimeout, "timeout"_a, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly(
          "mem_allocator", [](ProcessGroupNVX&) { return mem_allocator(); }, "The allocator for torch.cuda.MemPool.")
      .def("comm_split_count", [](ProcessGroupNVX&) { return 0; })
      .def(
          "perform_nocolor_split", [](ProcessGroupNVX&, const py::object&) {}, "device"_a,
          "Members of a split make a communicator of their own; the others have nothing to do.");
}

/// For benchmarks: the seconds of a flag's round trip between two ranks, negative if the other does not answer.
double time_flag_round(const py::buffer& shared, int side, int rounds) {
  const py::buffer_info memory = shared.request(/*writable=*/true);
  TORCH_CHECK_VALUE(size_t(memory.size * memory.itemsize) >= kFlagRoundBytes, "nvx: too small for a flag round");
  py::gil_scoped_release release;
  return flag_round(memory.ptr, side, rounds).count();
}

/// A backend that moves no data: the lower bound of every latency measured through torch.
class NullBackend final : public c10d::Backend {
 public:
  NullBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "nvx_null"; }

  IntrusiveWork broadcast(Tensors&, const c10d::BroadcastOptions&) override { return nullptr; }
  IntrusiveWork allreduce(Tensors&, const c10d::AllreduceOptions&) override { return nullptr; }
  IntrusiveWork reduce(Tensors&, const c10d::ReduceOptions&) override { return nullptr; }
  IntrusiveWork allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override { return nullptr; }
  IntrusiveWork _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override { return nullptr; }
  IntrusiveWork gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override { return nullptr; }
  IntrusiveWork scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override { return nullptr; }
  IntrusiveWork _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return nullptr;
  }
  IntrusiveWork alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                              const c10d::AllToAllOptions&) override {
    return nullptr;
  }
  IntrusiveWork barrier(const c10d::BarrierOptions&) override { return nullptr; }
};

constexpr const char* kOptionsText =
    R"(The pg_options of init_process_group and new_group for nvx.

timeout: how long an operation, or making the group, may wait: a timedelta. Unless it is 30 minutes, the default, it
    overrides the timeout of init_process_group or new_group. NVX_TIMEOUT_S overrides both.
kernels: "auto", "0" or "1", instead of NVX_KERNELS, and inherited by groups that split off; "": as NVX_KERNELS says.
    The same on all ranks.
tune: keys of `nvx explain`'s table as text ("all_reduce.one_shot=16K") or a dict, instead of the same keys of NVX_TUNE,
    and inherited by groups that split off. The same on all ranks.
group_desc: a description of the group; nvx does not use it.
group_name, global_ranks_in_group: set by nvx when the group is made; values that you pass are ignored, except the name
    of an nvx.ProcessGroup, which logs and errors have.
enable_reconfigure: from torch 2.14 on; if True, the group begins without ranks: dist._reconfigure sets them.)";

constexpr const char* kKernelWords[] = {"0", "auto", "1"};  // by Kernels

void set_kernels(ProcessGroupNVX::Options& options, const std::string& word) {
  if (word.empty()) return options.kernels.reset();
  if (std::ranges::find(kKernelWords, word) == std::end(kKernelWords))
    throw_argument_error("nvx: kernels=\"" + word + "\" is none of \"auto\", \"0\", \"1\" and \"\"");
  options.kernels = kernels_of(word);
}
std::string get_kernels(const ProcessGroupNVX::Options& options) {
  return options.kernels ? kKernelWords[size_t(*options.kernels)] : "";
}

void set_tune(ProcessGroupNVX::Options& options, const py::object& keys) {
  std::string text;
  if (py::isinstance<py::dict>(keys)) {
    for (const auto& [key, value] : keys.cast<py::dict>())
      text += (text.empty() ? "" : ",") + py::str(key).cast<std::string>() + '=' + py::str(value).cast<std::string>();
  } else if (!py::isinstance<py::str>(keys)) {
    throw_argument_type_error("nvx: nvx.Options(tune=...) takes text or a dict, not ", Py_TYPE(keys.ptr())->tp_name);
  } else {
    text = keys.cast<std::string>();
  }
  try {
    if (!text.empty()) (void)tuning_of(text);
  } catch (const Error& error) {
    throw_argument_error(error.what());
  }
  options.tune = text;
}

py::object shown(const ProcessGroupNVX::Options& options) {
  const char* format =
      "nvx.Options(timeout={!r}, group_desc={!r}, group_name={!r}, global_ranks_in_group={!r}, kernels={!r}, "
      "tune={!r})";
  return py::str(format).format(options.timeout, options.group_desc, options.group_name, options.global_ranks_in_group,
                                get_kernels(options), options.tune);
}

/// A class that derives from both, made like a class statement does.
py::object new_error(const char* name, PyObject* kind) {
  const py::object type = py::module_::import("builtins").attr("type");
  py::dict body;
  body["__module__"] = "nvx";
  return type(name, py::make_tuple(py::handle(kind), py::handle(PyExc_RuntimeError)), body);
}

/// Registered so that it runs before torch's own translator, which would raise plain ValueError and TypeError.
void register_errors(py::module_& m) {
  m.attr("ArgumentError") = new_error("ArgumentError", PyExc_ValueError);
  m.attr("ArgumentTypeError") = new_error("ArgumentTypeError", PyExc_TypeError);
  static py::handle argument = py::object(m.attr("ArgumentError")).release();
  static py::handle type = py::object(m.attr("ArgumentTypeError")).release();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const ArgumentError& error) {
      PyErr_SetString(argument.ptr(), error.what_without_backtrace());
    } catch (const ArgumentTypeError& error) {
      PyErr_SetString(type.ptr(), error.what_without_backtrace());
    }
  });
}

/// UCX from PyPI is in the package's folder that Python finds, which may differ from this module's.
void point_at_ucx_package() {
  try {
    const py::object package = py::module_::import("importlib.util").attr("find_spec")("libucx");
    if (package.is_none()) return;
    for (const py::handle folder : package.attr("submodule_search_locations"))
      net::add_ucx_place(folder.cast<std::string>() + "/lib");
  } catch (const std::exception& error) {  // also Python's: users without multiple hosts do not need UCX
    const auto* const raised = dynamic_cast<const py::error_already_set*>(&error);
    if (raised && !raised->matches(PyExc_Exception)) throw;  // an interrupt or an exit
    NVX_LOG(kInfo, "the Python package libucx cannot be used: %s", error.what());
  }
}

/// At the interpreter's exit: ends the pool's threads, aborts the operations that block them, and completes sends
/// to other hosts.
///
/// Threads of the pool must not run while the process and its stores are torn down. The slowest thread is rank 0's
/// while it makes a group: it notices within one slice of its wait for the store that the group is aborted. Then it
/// waits up to 0.8 s until the other ranks know, because it may serve their store.
void stop_everything() {
  constexpr std::chrono::milliseconds kLast{2500}, kToPython{50};
  exiting.store(true);
  constexpr auto kGrace = Communicator::kGraceForProxies;
  const Deadline deadline = Deadline::after(kGrace);
  auto& communicators = LiveObjects<Communicator>::instance();
  {
    const Uninterrupted here;  // an interrupt would fail groups whose operations are about to end
    communicators.each([&](Communicator& one) { one.issuer.drain(deadline, kGrace); });
  }
  ThreadPool::instance().stop(std::chrono::milliseconds(100));
  const auto each_group = [&](const auto& act) {
    communicators.each([&](Communicator& one) {
      for (const auto& group : one.context.groups.all()) act(*group);
    });
  };
  const auto in_calls = [&] {
    bool any = false;
    each_group(
        [&](Group& group) { any |= !group.lane().settle({}, Lane::Until::kIdle) || group.mailbox().has_waiters(); });
    return any;
  };
  const bool daemons = in_calls();
  if (daemons || ThreadPool::instance().threads() != 0) {
    each_group([](Group& group) { group.abort("its process exits"); });
    ThreadPool::instance().stop(kLast);
  }
  if (daemons) {  // a thread that asks for the GIL in C++ once Python has ended terminates the process
    (void)poll_until([&] { return !in_calls(); }, Deadline::after(kLast));
    std::this_thread::sleep_for(kToPython);
  }
  HookThread::await_all();
  const auto messenger = net::Messenger::opened();
  if (!messenger) return;
  messenger->finish();
  if (net::JobKey::instance()) messenger->close();  // libcrypto, which its handshakes use, is torn down too
}

}  // namespace
}  // namespace nvx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace nvx;
  using namespace py::literals;
  py::module_::import("torch._C._distributed_c10d");
  using BackendOptions = c10d::Backend::Options;
  point_at_ucx_package();  // before anything is registered: it throws if the user interrupts
  register_errors(m);

  Class<ProcessGroupNVX, c10d::Backend> group(m, "ProcessGroupNVX");
  Class<ProcessGroupNVX::Options, BackendOptions>(group, "Options", kOptionsText)
      .def(py::init([](std::chrono::milliseconds timeout, const std::string& kernels, const py::object& tune) {
             auto options = c10::make_intrusive<ProcessGroupNVX::Options>(timeout);
             set_kernels(*options, kernels);
             set_tune(*options, tune);
             return options;
           }),
           "timeout"_a = kBackendDefaultTimeout, "kernels"_a = "", "tune"_a = "")
      .def_property("kernels", &get_kernels, &set_kernels)
      .def_property(
          "tune", [](const ProcessGroupNVX::Options& options) { return options.tune; }, &set_tune)
      .def_readwrite("timeout", &ProcessGroupNVX::Options::timeout)
      .def_readwrite("group_name", &ProcessGroupNVX::Options::group_name)
      .def_readwrite("group_desc", &ProcessGroupNVX::Options::group_desc)
      .def_readwrite("global_ranks_in_group", &ProcessGroupNVX::Options::global_ranks_in_group)
      .def_readwrite("_replaces_gloo", &ProcessGroupNVX::Options::replaces_gloo)
      .def_readwrite("_barrier_on_host", &ProcessGroupNVX::Options::barrier_on_host)
      .def("__repr__", &shown)
      .def("__copy__",
           [](const ProcessGroupNVX::Options& self) { return c10::make_intrusive<ProcessGroupNVX::Options>(self); })
      .def("__deepcopy__", [](const ProcessGroupNVX::Options& self, const py::dict&) {
        return c10::make_intrusive<ProcessGroupNVX::Options>(self);
      });
  define_group(group);
  group.def(init_group<ProcessGroupNVX>(), "store"_a, "rank"_a, "size"_a, "options"_a = py::none(),
            "_by_torch"_a = false);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  Class<Reconfigurable, ProcessGroupNVX>(m, "Reconfigurable")
      .def(init_group<Reconfigurable>(), "store"_a, "rank"_a, "size"_a, "options"_a = py::none(),
           "_by_torch"_a = false);
#endif
  Class<NullBackend, c10d::Backend>(m, "NullBackend", "Moves no data: measures the cost of torch itself.")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>&, int rank, int size) {
             return c10::make_intrusive<NullBackend>(rank, size);
           }),
           "store"_a, "rank"_a, "size"_a);
  m.def("set_timeout", &set_timeout, "backend"_a, "timeout"_a, py::call_guard<py::gil_scoped_release>());
  m.def("pool_stats", &pool_stats, "backend"_a);
  m.def("explain", &explain_choice, "collective"_a, "nbytes"_a, "ranks"_a = 2, "hosts"_a = 1);
  m.def("tuning", &tuning, "ranks"_a = 2, "hosts"_a = 1);
  m.def("ways", &ways_on_cpu, "collective"_a, "nbytes"_a, "ranks"_a = 2, "hosts"_a = 1, "rdma_gb_s"_a = 0.0,
        "cores"_a = 0, "l3_bytes"_a = 0);
  m.def("simulate", &simulate_on, "collective"_a, "nbytes"_a, "hosts"_a, "ranks_per_host"_a, "inside"_a, "between"_a,
        "latency"_a, "cards"_a = 1);
  m.def("taken_on_device", &taken_on_device, "ranks"_a);
  m.def("ways_on_device", &ways_on_device, "collective"_a, "nbytes"_a, "ranks"_a = 2, "hosts"_a = 1, "no_nccl"_a = "",
        "rdma_gb_s"_a = 0.0);
  m.def("flag_round", &time_flag_round, "shared"_a, "side"_a, "rounds"_a);
  m.def("config_table", &config_table);
  m.def("config_unknown", &config_unknown);
  m.def("build_info", &build_info);
  register_inspection(m);
  register_symmetric_memory();
  m.attr("torch_version") = kTorchVersion;

  interrupt_check.store(&run_signal_handlers);
  m.def("_stop", [] {
    py::gil_scoped_release release;
    stop_everything();
    interrupt_check.store(nullptr);
  });
}
