#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch/version.h>

#include <cstring>
#include <thread>

#include "graph.h"
#include "memory.h"
#include "pool.h"
#include "rules.h"
#include "streams.h"

namespace fake {

namespace {

// A tensor as a task sees it: the addresses of the elements, without ownership.
struct View {
  explicit View(const at::Tensor& tensor)
      : data(tensor.is_privateuseone() ? real(tensor.const_data_ptr()) : const_cast<void*>(tensor.const_data_ptr())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        type(tensor.scalar_type()),
        bytes(tensor.nbytes()),
        conj(tensor.is_conj()),
        neg(tensor.is_neg()),
        dense(tensor.is_non_overlapping_and_dense()) {}

  at::Tensor tensor() const {
    at::Tensor made = at::from_blob(data, sizes, strides, at::TensorOptions(type));
    made._set_conj(conj);
    made._set_neg(neg);
    return made;
  }

  bool same_bytes_as(const View& other) const {
    return dense && type == other.type && sizes == other.sizes && strides == other.strides && conj == other.conj &&
           neg == other.neg;
  }

  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;
  size_t bytes;
  bool conj, neg, dense;
};

void copy_now(const View& to, const View& from) {
  if (to.same_bytes_as(from)) {
    std::memcpy(to.data, from.data, to.bytes);
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  to.tensor().copy_(from.tensor());
}

std::atomic<double> copy_rate{0};  // bytes per second; 0: no limit

void copy_over_the_bus(const View& to, const View& from) {
  const auto begin = std::chrono::steady_clock::now();
  copy_now(to, from);
  if (const double rate = copy_rate; rate > 0)
    std::this_thread::sleep_until(begin + std::chrono::nanoseconds(int64_t(1e9 * double(to.bytes) / rate)));
}

// A copy between devices runs on the current stream of the source, and both streams wait for each other, like with
// CUDA.
void copy_on_devices(const at::Tensor& to, const at::Tensor& from) {
  Queue& queue = current_queue(from.device().index());
  Queue& other = current_queue(to.device().index());
  if (&other != &queue) queue.wait_for(other.mark(Pace::kAtOnce));
  queue.push([to = View(to), from = View(from)] { copy_now(to, from); });
  if (&other != &queue) other.wait_for(queue.mark(Pace::kAtOnce));
}

// The host conjugates and negates after a copy to it, synchronously, like with CUDA.
void copy_with_host(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::Tensor& device_side = to.is_privateuseone() ? to : from;
  const void* host_data = (to.is_privateuseone() ? from : to).const_data_ptr();
  const c10::Stream stream = current_stream(device_side.device().index());
  Queue& queue = queue_of(stream);
  View target(to);
  const bool conj = to.is_cpu() && to.is_conj() != from.is_conj(), neg = to.is_cpu() && to.is_neg() != from.is_neg();
  target.conj ^= conj;
  target.neg ^= neg;
  queue.push([to = target, from = View(from)] { copy_over_the_bus(to, from); });
  if (non_blocking && is_pinned(host_data)) {
    record_pinned_use(host_data, queue);
  } else {
    synchronize_stream(stream);
  }
  if (conj) to.conj_physical_();
  if (neg) to.neg_();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || (to.is_same(from))) return to;
  const at::Tensor source = from.expand_as(to);
  if (to.is_privateuseone() && source.is_privateuseone()) {
    copy_on_devices(to, source);
  } else {
    copy_with_host(to, source, non_blocking);
  }
  return to;
}

void give_memory(const at::Tensor& tensor) {
  const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                         size_t(tensor.storage_offset()));
  if (tensor.numel() > 0 && tensor.storage().nbytes() < needed) resize_storage(tensor.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  at::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  if (format) tensor->empty_tensor_restride(*format);
  give_memory(self);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

void push_fill(at::Tensor& self, const at::Scalar& value, double ms) {
  if (self.numel() == 0) return;
  current_queue(self.device().index()).push([view = View(self), value, ms] {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
    at::AutoDispatchBelowADInplaceOrView below;
    view.tensor().fill_(value);
  });
}

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
  push_fill(self, value, 0);
  return self;
}

at::Tensor& zero_(at::Tensor& self) {
  push_fill(self, 0, 0);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  copy_from(self.reshape({}), host, /*non_blocking=*/false);
  return at::native::_local_scalar_dense_cpu(host);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  TORCH_CHECK(self.device() == source.device(), "a storage of ", source.device(), " for a tensor of ", self.device());
  at::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  if (stride.data() != nullptr) {
    tensor->set_sizes_and_strides(size, stride);
  } else {
    tensor->set_sizes_contiguous(size);
  }
  tensor->set_storage_offset(offset);
  give_memory(self);
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) {
  c10::impl::VirtualGuardImpl(kFake).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// The copies to the CPU wait for the streams that wrote the arguments. The copies back are synchronous.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count(kFallbacks);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// `_copy_from` itself handles conjugated and negated views.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("fill_.Scalar", TORCH_FN(fill_));
  m.impl("zero_", TORCH_FN(zero_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("record_stream", TORCH_FN(record_stream));
}

// --- operators for tests ---------------------------------------------------------------------------------------

void slow_fill(at::Tensor& self, const at::Scalar& value, double ms) {
  TORCH_CHECK(self.is_privateuseone(), "slow_fill is for tensors of fakegpu");
  push_fill(self, value, ms);
}

at::Tensor peek(const at::Tensor& self) {
  TORCH_CHECK(self.is_privateuseone(), "peek is for tensors of fakegpu");
  at::Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU).requires_grad(false));
  if (self.numel() > 0) copy_now(View(host), View(self));
  return host;
}

std::mutex holds_mutex;
std::vector<MarkPtr> holds;

int64_t hold(at::Stream stream) {
  auto mark = std::make_shared<Mark>();
  queue_of(stream).wait_for(mark);
  std::lock_guard lock(holds_mutex);
  holds.push_back(mark);
  return int64_t(holds.size()) - 1;
}

void release(int64_t number) {
  std::lock_guard lock(holds_mutex);
  if (const MarkPtr mark = std::exchange(holds.at(number), nullptr)) mark->pass();
}

std::mutex graphs_mutex;
std::vector<std::shared_ptr<Graph>> graphs;

int64_t begin_capture(at::Stream stream, int64_t mode) {
  std::lock_guard lock(graphs_mutex);
  TORCH_CHECK(!queue_of(stream).graph(), "fakegpu: the stream is in a capture already");
  graphs.push_back(Graph::begin(queue_of(stream), Mode(mode)));
  return int64_t(graphs.size()) - 1;
}

void end_capture(int64_t number, at::Stream stream) {
  std::lock_guard lock(graphs_mutex);
  graphs.at(number)->end(queue_of(stream));
}

void replay(int64_t number, at::Stream stream) {
  std::lock_guard lock(graphs_mutex);
  graphs.at(number)->replay(queue_of(stream));
}

std::vector<std::vector<std::string>> graph_nodes(int64_t number) {
  std::lock_guard lock(graphs_mutex);
  return graphs.at(number)->nodes();
}

c10::Dict<std::string, int64_t> counts() {
  c10::Dict<std::string, int64_t> found;
  for (int i = 0; i < kCounters; ++i) found.insert(counter_names[i], counters[i].load());
  return found;
}

void reset_counts() {
  for (auto& counter : counters) counter = 0;
}

TORCH_LIBRARY(fake_device, m) {
  m.def("slow_fill(Tensor(a!) self, Scalar value, float ms) -> ()", TORCH_FN(slow_fill));
  m.def("peek(Tensor self) -> Tensor", TORCH_FN(peek));
  m.def("hold(Stream stream) -> int", TORCH_FN(hold));
  m.def("release(int number) -> ()", TORCH_FN(release));
  m.def("begin_capture(Stream stream, int mode) -> int", TORCH_FN(begin_capture));
  m.def("exchange_capture_mode(int mode) -> int", [](int64_t mode) { return int64_t(exchange_mode(Mode(mode))); });
  m.def("break_rule(int rule, bool broken) -> ()", [](int64_t rule, bool broken) { break_rule(Rule(rule), broken); });
  m.def("fail_queries(bool fail) -> ()", TORCH_FN(fail_queries));
  m.def("fail_records(bool fail) -> ()", TORCH_FN(fail_records));
  m.def("end_capture(int graph, Stream stream) -> ()", TORCH_FN(end_capture));
  m.def("replay(int graph, Stream stream) -> ()", TORCH_FN(replay));
  m.def("graph_nodes(int graph) -> str[][]", TORCH_FN(graph_nodes));
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  m.def("is_capturing(Stream stream) -> bool",
        [](at::Stream stream) { return c10::impl::VirtualGuardImpl(kFake).isStreamCapturing(stream); });
#endif
  m.def("counts() -> Dict(str, int)", TORCH_FN(counts));
  m.def("reset_counts() -> ()", TORCH_FN(reset_counts));
  m.def("set_delays(int seed, int most_us) -> ()",
        [](int64_t seed, int64_t most_us) { set_delays(uint64_t(seed), most_us); });
  m.def("set_queue_depth(int most) -> ()", [](int64_t most) { set_queue_depth(most > 0 ? size_t(most) : SIZE_MAX); });
  m.def("set_copy_rate(float bytes_per_second) -> ()", [](double rate) { copy_rate = rate; });
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("new_pool(int device, int malloc, int free) -> int", TORCH_FN(new_pool));
  m.def("exchange_pool(int pool) -> int", [](int64_t number) {
    static thread_local int64_t before = -1;
    (void)exchange_pool(number < 0 ? nullptr : &pool_of(number));
    return std::exchange(before, number);
  });
  m.def("empty_pool(int pool) -> ()", [](int64_t number) { pool_of(number).empty(); });
  m.def("drain(int most_ms) -> bool", TORCH_FN(drain_all));
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = device_allocator().allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0 && storage.data() != nullptr) device_allocator().copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

}  // namespace fake
