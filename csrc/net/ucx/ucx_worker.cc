#include "net/ucx/ucx_worker.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <map>
#include <span>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/text.h"
#include "net/descriptors.h"
#include "net/interfaces.h"

namespace nvx::net {
namespace {

struct Setting {
  std::string key;
  std::string value;
};

const char* set_by_user(const std::string& key) {
  const bool of_transport = key.starts_with("TCP_");  // UCX ignores NVX_UCX_TCP_*
  const char* own = of_transport ? nullptr : std::getenv(("NVX_UCX_" + key).c_str());
  return own ? own : std::getenv(("UCX_" + key).c_str());
}

/// The interfaces that UCX uses and listens on: those that the user named. Otherwise the interface that leads to
/// `store_host` and its rails; versions before 1.16 get that interface alone, because they do not query the kernel
/// which interface leads to a peer. If `store_host` is unknown, all but the loopback and the bridges of containers.
std::string net_devices(const UcxVersion& version, const std::string& store_host) {
  if (set_by_user("NET_DEVICES")) return "";
  const bool queries_routes = version >= UcxVersion{1, 16, 0};
  std::vector<std::string> chosen = chosen_interfaces(store_host, queries_routes);
  if (chosen.empty()) return "";
  // RDMA ports are not interfaces of the system, so a list of interfaces does not exclude them.
  for (std::string& port : rdma_ports()) chosen.push_back(std::move(port));
  return joined(chosen, ",");
}

bool may_use_rdma() {
  const char* transports = set_by_user("TLS");
  return has_rdma() && !(transports && transports == std::string_view("tcp"));
}

std::vector<Setting> general_settings(const UcxVersion& version, const std::string& store_host) {
  std::vector<Setting> settings = {{"TLS", "^sm"}};  // endpoints that notice a death cannot use shared memory anyway
  if (std::string devices = net_devices(version, store_host); !devices.empty())
    settings.push_back({"NET_DEVICES", devices});
  if (may_use_rdma()) return settings;
  // TCP has its own keepalive. UCX's, every 20 s, resets the kernel's count of failed probes.
  settings.push_back({"KEEPALIVE_INTERVAL", "100s"});
  // UCX copies what it sends. If an endpoint is closed while a zero-copy send is half in its socket, UCX drops the rest
  // and polls that socket without end, and uses freed memory when the peer closes too. Of a copy it sends the rest.
  settings.push_back({"ZCOPY_THRESH", "inf"});
  return settings;
}

/// UCX reports a silent host after 10 + 3 x 2 s without traffic, later if NVX_LIVENESS_S is longer; limit_silence() has
/// the limit with traffic. Connecting never blocks. TCP_SYN_CNT is not set, because that corrupts the memory
/// of UCX 1.13 to 1.22. A buffer holds a whole segment of the link: UCX 1.22 assembles fragments at the endpoint whose
/// id they carry. After both sides have closed connections, that endpoint may no longer exist, and UCX drops them
/// without an error.
std::vector<Setting> tcp_settings() {
  const char* transports = set_by_user("TLS");
  const auto names = [&](const char* word) { return std::strstr(transports, word) != nullptr; };
  if (transports && !names("tcp") && !names("all") && !names("^")) return {};
  const int64_t liveness_s = std::chrono::ceil<std::chrono::seconds>(config().liveness).count();
  const int64_t probes = std::clamp<int64_t>((liveness_s - 4) / 2, 3, 127);  // the most that Linux takes
  return {{"TCP_KEEPCNT", std::to_string(probes)}, {"TCP_CONN_NB", "y"}, {"TCP_TX_SEG_SIZE", "64k"}};
}

/// Sets environment variables while it lives, because before 1.17 a transport reads its settings only there.
class BriefEnvironment {
 public:
  void set(const Setting& setting) {
    names_.push_back("UCX_" + setting.key);
    setenv(names_.back().c_str(), setting.value.c_str(), /*overwrite=*/1);
  }
  BriefEnvironment() = default;
  ~BriefEnvironment() {
    for (const std::string& name : names_) unsetenv(name.c_str());
  }
  BriefEnvironment(const BriefEnvironment&) = delete;
  BriefEnvironment& operator=(const BriefEnvironment&) = delete;

 private:
  std::vector<std::string> names_;
};

/// Transport and device of every resource, as in "#      resource 0  :  md 0  dev 0  flags -- tcp/eth0".
std::map<std::string, std::vector<std::string>> resources(const UcxLibrary& ucx, ucp_context_h context) {
  std::map<std::string, std::vector<std::string>> devices;
  char* text = nullptr;
  size_t bytes = 0;
  FILE* stream = open_memstream(&text, &bytes);
  if (!stream) return devices;
  ucx.context_print_info(context, stream);
  std::fclose(stream);
  std::istringstream lines(std::string(text, bytes));
  std::free(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t slash = line.rfind('/'), blank = line.rfind(' ');
    if (line.find(" resource ") == std::string::npos || slash == std::string::npos || blank > slash) continue;
    devices[line.substr(blank + 1, slash - blank - 1)].push_back(line.substr(slash + 1));
  }
  return devices;
}

std::atomic<int> workers{0}, workers_of_parent{0};

/// The workers that a forked child has to close. A process has one, except in tests.
std::array<std::atomic<const UcxWorker*>, 16> first_workers{};

void replace(const UcxWorker* known, const UcxWorker* by) {
  for (std::atomic<const UcxWorker*>& worker : first_workers) {
    const UcxWorker* expected = known;
    if (worker.compare_exchange_strong(expected, by)) return;
  }
}

/// Throws Error in a child of a process with workers: UCX would wait for its thread, which is gone there.
uint32_t own_generation() {
  [[maybe_unused]] static const bool kRegistered = in_forked_children([] {
    workers_of_parent.fetch_add(workers.exchange(0));
    for (std::atomic<const UcxWorker*>& first : first_workers) {
      if (const UcxWorker* worker = first.exchange(nullptr)) worker->close_in_child();
    }
  });
  if (workers_of_parent.load() != 0) {
    throw Error(Code::kSystem,
                "nvx: this process was forked from one with connections to other hosts, so UCX does not work in it",
                "start processes with 'spawn' or 'forkserver' (multiprocessing.set_start_method), or before the first "
                "group");
  }
  return fork_generation();
}

/// The families of transports of RDMA, and of those that work inside a host only.
constexpr const char* kRdma[] = {"rc_", "dc_", "ud_", "srd", "gga_"};
constexpr const char* kLocal[] = {"self", "posix", "sysv", "cma", "knem", "xpmem", "cuda_", "gdr_", "rocm_", "ze_"};

bool is_in(std::span<const char* const> families, const std::string& transport) {
  return std::ranges::any_of(families, [&](const char* family) { return transport.starts_with(family); });
}

/// The user's settings that may exclude all transports: " with UCX_TLS=sm".
std::string restrictions() {
  std::string text;
  for (const std::string key : {"TLS", "NET_DEVICES"}) {
    const char* value = set_by_user(key);
    if (!value) continue;
    const std::string prefix = std::getenv(("NVX_UCX_" + key).c_str()) ? "NVX_UCX_" : "UCX_";
    text += (text.empty() ? " with " : ", ") + prefix + key + "=" + value;
  }
  return text;
}

Error no_transport(const std::string& library) {
  std::vector<std::string> names;
  for (const Interface& interface : interfaces()) names.push_back(interface.name);
  const std::vector<std::string> ports = rdma_ports();
  const bool lacks_address = ports.empty() && !names.empty() && own_addresses().empty();
  return {Code::kSystem,
          "nvx: no transport to other hosts" + restrictions() + " in " + library + "; this host has " +
              (ports.empty() ? "no active RDMA port" : "RDMA ports " + joined(ports)) + " and " +
              (names.empty() ? "no interface that is up" : "interfaces " + joined(names)) +
              (lacks_address ? " without an address for other hosts" : ""),
          lacks_address ? kGiveAddress : "unset the variables that exclude them, or name an interface that is up"};
}

/// Throws Error unless this process can have two more threads, of UCX and of the messenger: UCX aborts the process if
/// it gets none.
void require_threads() {
  struct Release {
    std::latch& end;
    ~Release() { end.count_down(); }
  };
  std::latch end(1);
  std::vector<std::jthread> started;  // joined after `release` has let them end
  const Release release{end};
  try {
    for (int i = 0; i < 2; ++i) started.emplace_back([&end] { end.wait(); });
  } catch (const std::system_error& error) {
    throw system_error("cannot start a thread for the link to other hosts", error.code().value());
  }
}

}  // namespace

UcxWorker::UcxWorker(const std::string& store_host) : generation_(own_generation()), ucx_(ucx_library()) {
  constexpr size_t kDescriptors = 16;  // UCX 1.22 aborts the process if it can open only 6 to 9 for TCP
  require_descriptors(kDescriptors, "cannot open UCX");
  require_threads();
  try {
    BriefEnvironment environment;
    if (ucx_.version < UcxVersion{1, 17, 0}) {
      for (const Setting& setting : tcp_settings()) {
        if (!set_by_user(setting.key)) environment.set(setting);
      }
    }
    make_context(store_host);
    make_worker();
    take_address();
    query_transports();
    workers.fetch_add(1);
    replace(nullptr, this);
  } catch (...) {
    if (worker_) ucx_.worker_destroy(worker_);
    if (context_) ucx_.cleanup(context_);
    throw;
  }
}

void UcxWorker::close() {
  if (!worker_ || !mine()) return;
  replace(this, nullptr);
  ucx_.worker_destroy(std::exchange(worker_, nullptr));
  ucx_.cleanup(context_);
  workers.fetch_sub(1);
}

void UcxWorker::claim_sockets() const { net::claim_sockets(fd_); }

void UcxWorker::close_in_child() const {
  close_sockets(fd_);
  listeners_.close_in_child();
}

bool UcxWorker::mine() const { return fork_generation() == generation_; }

void UcxWorker::require(ucs_status_t status, const char* what) const {
  if (status == UCS_OK) return;
  throw Error(Code::kSystem,
              "nvx: UCX " + ucx_.version.text() + " (" + ucx_.from.path() + "): " + what +
                  " failed: " + ucx_.status_string(status) + descriptor_limit_hint(),
              "set UCX_LOG_LEVEL=info to see UCX's own messages");
}

void UcxWorker::make_context(const std::string& store_host) {
  ucp_config_t* config = nullptr;
  require(ucx_.config_read("NVX", nullptr, &config), "reading the configuration");
  std::vector<Setting> settings = general_settings(ucx_.version, store_host);
  if (ucx_.version >= UcxVersion{1, 17, 0}) {
    for (Setting& setting : tcp_settings()) settings.push_back(std::move(setting));
  }
  for (const Setting& setting : settings) {
    if (set_by_user(setting.key)) continue;
    const ucs_status_t status = ucx_.config_modify(config, setting.key.c_str(), setting.value.c_str());
    if (status != UCS_OK) NVX_LOG(kInfo, "UCX does not know %s", setting.key.c_str());
  }
  // Otherwise worker_create() reads from the connections that UCX has accepted since it listens: before the filter.
  const ucs_status_t unread = ucx_.config_modify(config, "ADAPTIVE_PROGRESS", "n");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.name = "nvx";
  const ucs_status_t status = ucx_.init_version(kOldestUcx.major, kOldestUcx.minor, &params, config, &context_);
  ucx_.config_release(config);
  require(unread, "setting ADAPTIVE_PROGRESS");
  if (status == UCS_ERR_NO_DEVICE) throw no_transport("UCX " + ucx_.version.text() + " (" + ucx_.from.path() + ")");
  require(status, "making a context");
}

void UcxWorker::make_worker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  require(ucx_.worker_create(context_, &params, &worker_), "making a worker");
  require(ucx_.worker_get_efd(worker_, &fd_), "querying its event descriptor");
}

void UcxWorker::take_address() {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  attributes.address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
  require(ucx_.worker_query(worker_, &attributes), "querying the address");
  const auto* bytes = reinterpret_cast<const std::byte*>(attributes.address);
  address_.assign(bytes, bytes + attributes.address_length);
  ucx_.worker_release_address(worker_, attributes.address);
}

void UcxWorker::query_transports() {
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  require(ucx_.context_query(context_, &attributes), "querying memory types");
  std::string transports;
  const auto found = resources(ucx_, context_);
  bool all_local = !found.empty();  // an empty list means that this UCX prints it in an unknown way
  for (const auto& [transport, devices] : found) {
    has_rdma_ |= is_in(kRdma, transport);
    all_local &= is_in(kLocal, transport);
    if (transport != "self") transports += ", " + transport + " on " + joined(devices, ",");
  }
  const auto tcp = found.find("tcp");
  listeners_.restrict_to_admitted(address_, tcp == found.end() ? 0 : tcp->second.size());
  if (tcp != found.end() && !has_rdma_) reached_at_ = host_addresses(tcp->second);
  has_cuda_ = attributes.memory_types & (uint64_t(1) << UCS_MEMORY_TYPE_CUDA);
  description_ = "UCX " + ucx_.version.text() + " (" + ucx_.from.path() + ")" + transports +
                 (has_cuda_ ? ", host and CUDA memory" : ", host memory");
  if (all_local) throw no_transport(description_);
}

/// Over TCP, UCX copies device memory to host memory by itself: in small pieces, and behind kernels that wait.
std::string UcxWorker::use_device_memory(std::span<const std::byte> range) {
  if (!has_cuda_) return "UCX's context reports host memory alone";
  if (!has_rdma_) return "UCX has no transport of RDMA here";
  if (!range.empty() && memory_type_of(range.data()) == UCS_MEMORY_TYPE_HOST) on_device_.push_back(range);
  return "";
}

ucs_memory_type_t UcxWorker::memory_type_of(const void* at) const {
  const auto holds = [at](const auto& range) { return at >= range.data() && at < range.data() + range.size(); };
  return std::ranges::any_of(on_device_, holds) ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
}

void UcxWorker::close_later(ucp_ep_h endpoint, std::chrono::milliseconds timeout) {
  closing_.push_back({endpoint, Clock::now() + timeout});
}

void UcxWorker::ready_to_close(ucp_ep_h endpoint) {
  for (Closing& closing : closing_) {
    if (closing.endpoint == endpoint && !closing.closing) closing.ready = true;
  }
}

bool UcxWorker::advance_closing() {
  if (!closing_.empty()) std::erase_if(closing_, [this](Closing& closing) { return advance_closing(closing); });
  return closing_.empty();
}

/// With RDMA, a flush waits for data that the NIC has sent and the peer has not acknowledged. Over TCP the kernel has
/// all data, and a flush would only wait for the peer to call UCX.
bool UcxWorker::advance_closing(Closing& closing) {
  if (!closing.closing) {
    const bool late = Clock::now() >= closing.force_at;
    if (!closing.ready && !late) return false;
    if (closing.ready && !closing.flushing && has_rdma_ && !late) {
      ucp_request_param_t param{};
      void* request = ucx_.ep_flush_nbx(closing.endpoint, &param);
      if (UCS_PTR_IS_PTR(request)) closing.flushing = request;
    }
    if (closing.flushing) {
      if (ucx_.request_check_status(closing.flushing) == UCS_INPROGRESS && !late) return false;
      ucx_.request_free(closing.flushing);
    }
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    void* request = ucx_.ep_close_nbx(closing.endpoint, &param);
    if (!UCS_PTR_IS_PTR(request)) return true;
    closing.closing = request;
  }
  if (ucx_.request_check_status(closing.closing) == UCS_INPROGRESS) return false;
  ucx_.request_free(closing.closing);
  return true;
}

void UcxWorker::limit_closing(std::chrono::milliseconds timeout) {
  const auto latest = Clock::now() + timeout;
  for (Closing& closing : closing_) closing.force_at = std::min(closing.force_at, latest);
}

}  // namespace nvx::net
