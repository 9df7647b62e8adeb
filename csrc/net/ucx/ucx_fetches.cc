#include "net/ucx/ucx_fetches.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace nvx::net {

ucs_status_t UcxFetches::begin(Receiver& receiver, std::span<const std::byte> header, void* descriptor, size_t bytes) {
  std::byte* place = receiver.place(header, bytes);
  if (!place && bytes > kMostUnplaced) return UCS_ERR_EXCEEDS_LIMIT;  // the sender gets this status
  auto fetch = std::make_unique<Fetch>(Fetch{this, {header.begin(), header.end()}, place, bytes, {}, UCS_INPROGRESS});
  if (!place) fetch->own.resize(std::max<size_t>(bytes, 1)), fetch->where = fetch->own.data();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.recv_am = on_fetched;
  param.user_data = fetch.get();
  // UCX may call back before it returns.
  Fetch* begun = fetches_.emplace_back(fetch.release());
  param.memory_type = worker_.memory_type_of(begun->where);
  void* request = worker_.ucx().am_recv_data_nbx(worker_.get(), descriptor, begun->where, bytes, &param);
  if (!UCS_PTR_IS_PTR(request)) end(*begun, UCS_PTR_RAW_STATUS(request));
  return UCS_INPROGRESS;
}

void UcxFetches::end(Fetch& fetch, ucs_status_t status) {
  fetch.status = status;
  std::erase(fetches_, &fetch);
  fetched_.push_back(&fetch);
}

void UcxFetches::on_fetched(void* request, ucs_status_t status, size_t, void* argument) noexcept {
  Fetch* fetch = static_cast<Fetch*>(argument);
  fetch->fetches->worker_.ucx().request_free(request);
  fetch->fetches->end(*fetch, status);
}

void UcxFetches::report(Receiver& receiver) {
  for (Fetch* item : std::exchange(fetched_, {})) {
    const std::unique_ptr<Fetch> fetch(item);
    if (fetch->status == UCS_OK) {
      receiver.arrived(fetch->header, {fetch->where, fetch->bytes});
    } else if (fetch->own.empty()) {
      receiver.dropped(fetch->header, fetch->where);
    }
  }
}

void UcxFetches::drop(Receiver& receiver) {
  fetched_.insert(fetched_.end(), fetches_.begin(), fetches_.end());
  fetches_.clear();
  for (Fetch* fetch : fetched_) fetch->status = UCS_ERR_CANCELED;
  report(receiver);
}

}  // namespace nvx::net
