// A backend that simulates NCCL on the fake accelerator. Each call becomes a task of the current stream. The task
// exchanges data with the other ranks through a store and blocks the stream until they have arrived.

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <class Function>
Function* of_device(const char* name) {
  auto* const found = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(found, "the fake accelerator has no ", name);
  return found;
}

// A CPU tensor over the memory of a device tensor, for tasks.
at::Tensor shown(const at::Tensor& tensor) {
  static auto* const translate = of_device<void*(void*)>("fake_device_real");
  if (tensor.numel() == 0) return at::empty({0}, at::dtype(tensor.scalar_type()));
  return at::from_blob(translate(tensor.data_ptr()), {tensor.numel()}, at::dtype(tensor.scalar_type()));
}

class FakeNccl final : public c10d::Backend {
 public:
  // `connecting` is the way to connect: "connect" waits for the other ranks like NCCL; "hang" blocks; "wait"
  // blocks in the store and ignores an abort; any other text is the error that it raises.
  FakeNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string connecting)
      : Backend(rank, size), state_(std::make_shared<State>()), connecting_(std::move(connecting)) {
    state_->store = std::move(store);
  }

  const std::string getBackendName() const override { return "fake_nccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const at::Tensor all = tensors.at(0);
    return begin("allreduce", opts.asyncOp, all,
                 [=, op = opts.reduceOp](Exchange& exchange) { shown(all).copy_(exchange.reduced(shown(all), op)); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    const at::Tensor all = tensors.at(0);
    return begin("reduce", opts.asyncOp, all, [=, op = opts.reduceOp](Exchange& exchange) {
      const at::Tensor sum = exchange.reduced(shown(all), op);
      if (exchange.rank == opts.rootRank) shown(all).copy_(sum);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const at::Tensor all = tensors.at(0);
    return begin("broadcast", opts.asyncOp, all, [=](Exchange& exchange) {
      shown(all).copy_(exchange.gathered(shown(all)).at(size_t(opts.rootRank)));
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    const at::Tensor out = output, in = input;
    return begin("allgather", opts.asyncOp, out,
                 [=](Exchange& exchange) { shown(out).copy_(at::cat(exchange.gathered(shown(in)))); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    const Tensors out = outputs.at(0);
    const at::Tensor in = inputs.at(0);
    return begin("allgather_list", opts.asyncOp, in, [=](Exchange& exchange) {
      const Tensors all = exchange.gathered(shown(in));
      for (size_t r = 0; r < out.size(); ++r) shown(out[r]).copy_(all[r]);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor out = output, in = input;
    return begin("reduce_scatter", opts.asyncOp, out, [=, op = opts.reduceOp](Exchange& exchange) {
      shown(out).copy_(exchange.reduced(shown(in), op).narrow(0, exchange.rank * out.numel(), out.numel()));
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    const at::Tensor out = outputs.at(0);
    const Tensors in = inputs.at(0);
    return begin("reduce_scatter_list", opts.asyncOp, out, [=, op = opts.reduceOp](Exchange& exchange) {
      Tensors mine;
      int64_t before = 0;
      for (int r = 0; r < int(in.size()); ++r) {
        mine.push_back(shown(in[size_t(r)]));
        if (r < exchange.rank) before += mine.back().numel();
      }
      shown(out).copy_(exchange.reduced(at::cat(mine), op).narrow(0, before, out.numel()));
    });
  }

  // Messages of a pair are matched by their order, whatever their tags are. A send ends when it has been received.
  WorkPtr send(Tensors& tensors, int peer, int tag) override { return add("send", tensors.at(0), peer, tag); }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override { return add("recv", tensors.at(0), peer, tag); }
  void startCoalescing() override { batch_ = std::make_unique<std::vector<Message>>(); }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(batch_ && !batch_->empty(), "an empty batch");
    const std::shared_ptr<const std::vector<Message>> batch = std::move(batch_);
    count("batch");
    enqueue(*device_, [state = state_, batch] {
      for (const Message& m : *batch) {
        const auto* begin = static_cast<const uint8_t*>(m.tensor.data_ptr());
        if (m.sends) state->store->set(m.key, std::vector<uint8_t>(begin, begin + m.tensor.nbytes()));
      }
      for (const Message& m : *batch) {
        if (m.sends) continue;
        state->await(m.key);
        const std::vector<uint8_t> data = state->store->get(m.key);
        std::memcpy(m.tensor.data_ptr(), data.data(), std::min(data.size(), m.tensor.nbytes()));
        state->store->set(m.key + "/received", std::vector<uint8_t>{1});
      }
      for (const Message& m : *batch) {
        if (m.sends) state->await(m.key + "/received");
      }
    });
    return nullptr;
  }

  void eagerConnectSingleDevice(at::Device) override {
    count("connect");
    if (connecting_ == "wait") state_->store->wait({"never"}, std::chrono::seconds(50));
    TORCH_CHECK(connecting_ == "connect" || connecting_ == "hang", connecting_);
    if (connecting_ == "connect") state_->store->set("connect/" + std::to_string(rank_), std::vector<uint8_t>{1});
    for (int r = 0; r < size_; ++r) {
      while (connecting_ == "hang" || !state_->store->check({"connect/" + std::to_string(r)})) {
        TORCH_CHECK(!state_->aborted, "connecting was cancelled");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }
  c10d::ErrorType getError() override { return state_->error; }
  void abort() override {
    count("abort");
    state_->aborted = true;
  }
  void shutdown() override { count("shutdown"); }

  // Counts calls by name, for tests.
  std::map<std::string, int> calls() const {
    const std::lock_guard lock(state_->mutex);
    return state_->calls;
  }
  void break_down() { state_->error = c10d::ErrorType::COMM_ERROR; }
  void refuse_calls() { state_->refuses = true; }

 private:
  struct State {
    c10::intrusive_ptr<c10d::Store> store;
    std::atomic<bool> aborted{false}, refuses{false};
    std::atomic<c10d::ErrorType> error{c10d::ErrorType::SUCCESS};
    mutable std::mutex mutex;
    std::map<std::string, int> calls;
    int64_t number = 0;

    void await(const std::string& key) const {
      while (!store->check({key})) {
        if (aborted) throw std::runtime_error("aborted");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  };
  struct Message {
    bool sends;
    std::string key;
    at::Tensor tensor;
  };

  // One operation, in which each rank publishes its data and reads the others' data.
  struct Exchange {
    State& state;
    int rank, size;
    std::string name;

    std::string key(int of) const { return name + "/" + std::to_string(of); }
    Tensors gathered(const at::Tensor& mine) const {
      const auto* begin = static_cast<const uint8_t*>(mine.data_ptr());
      state.store->set(key(rank), std::vector<uint8_t>(begin, begin + mine.nbytes() + (mine.nbytes() == 0)));
      Tensors all;
      for (int r = 0; r < size; ++r) {
        state.await(key(r));
        std::vector<uint8_t> theirs = state.store->get(key(r));
        const auto count = int64_t(theirs.size() / mine.itemsize());
        all.push_back(at::from_blob(theirs.data(), {count}, mine.options()).clone());
      }
      return all;
    }
    at::Tensor reduced(const at::Tensor& mine, const c10d::ReduceOp& op) const {
      Tensors all = gathered(mine);
      at::Tensor sum = all[0];
      for (size_t r = 1; r < all.size(); ++r) {
        switch (op.op_) {
          case c10d::ReduceOp::PRODUCT: sum.mul_(all[r]); break;
          case c10d::ReduceOp::MIN: sum = at::minimum(sum, all[r]); break;
          case c10d::ReduceOp::MAX: sum = at::maximum(sum, all[r]); break;
          default: sum.add_(all[r]);
        }
      }
      return op.op_ == c10d::ReduceOp::AVG ? sum.div_(size) : sum;
    }
  };

  WorkPtr add(const std::string& name, const at::Tensor& tensor, int peer, int /*tag*/) {
    TORCH_CHECK(batch_, "nvx is to give messages in batches");
    TORCH_CHECK(!state_->refuses, "not today");
    count(name);
    const bool sends = name == "send";
    const int from = sends ? rank_ : peer, to = sends ? peer : rank_;
    const int64_t number = (sends ? sent_ : received_)[peer]++;
    batch_->push_back({sends,
                       "message/" + std::to_string(from) + "/" + std::to_string(to) + "/" + std::to_string(number),
                       shown(tensor)});
    device_ = tensor.device();
    return nullptr;
  }

  void count(const std::string& name) {
    const std::lock_guard lock(state_->mutex);
    ++state_->calls[name];
  }

  // Like NCCL's synchronous calls: runs on the current stream and returns no `Work`.
  WorkPtr begin(const std::string& name, bool async, const at::Tensor& like, std::function<void(Exchange&)> act) {
    TORCH_CHECK(!async, "nvx is to call synchronously, on a stream of its choice");
    TORCH_CHECK(!state_->refuses, "not today");
    count(name);
    const auto number = [&] {
      const std::lock_guard lock(state_->mutex);
      return state_->number++;
    }();
    enqueue(like.device(), [state = state_, act = std::move(act), number, rank = rank_, size = size_] {
      Exchange exchange{*state, rank, size, std::to_string(number)};
      act(exchange);
    });
    return nullptr;
  }

  // On the device's current stream.
  static void enqueue(c10::Device device, std::function<void()> act) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    using Task = std::function<void()>;
    static auto* const push = of_device<void(void*, void (*)(void*), void (*)(void*), void*)>("fake_device_push");
    auto* task = new Task([act = std::move(act)] {
      try {
        act();
      } catch (const std::exception&) {  // like an aborted kernel
      }
    });
    push(
        c10::impl::VirtualGuardImpl(stream.device_type()).getStreamNativeHandle(stream),
        [](void* context) { (*static_cast<Task*>(context))(); },
        [](void* context) { delete static_cast<Task*>(context); }, task);
  }

  const std::shared_ptr<State> state_;
  const std::string connecting_;
  std::unique_ptr<std::vector<Message>> batch_;
  std::optional<c10::Device> device_;  // of the batch
  std::map<int, int64_t> sent_, received_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");
  py::class_<FakeNccl, c10::intrusive_ptr<FakeNccl>, c10d::Backend>(m, "FakeNccl")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::string connecting) {
        return c10::make_intrusive<FakeNccl>(store, rank, size, std::move(connecting));
      }))
      .def("calls", &FakeNccl::calls)
      .def("break_down", &FakeNccl::break_down)
      .def("refuse_calls", &FakeNccl::refuse_calls);
}
