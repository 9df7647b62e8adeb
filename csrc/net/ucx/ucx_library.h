#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "base/library.h"
#include "net/ucx/ucx_address.h"

namespace nvx::net {

/// libucp, loaded at run time. Its version may differ from the headers: UCX's structures grow only at their ends and
/// mark their valid fields by masks, so either side may be the newer one.
struct UcxLibrary {
  Library from;

  decltype(&ucp_get_version) get_version = from("ucp_get_version");
  UcxVersion version = version_or_throw();  // before the functions that older versions lack
  decltype(&ucp_init_version) init_version = from("ucp_init_version");
  decltype(&ucp_cleanup) cleanup = from("ucp_cleanup");
  decltype(&ucp_config_read) config_read = from("ucp_config_read");
  decltype(&ucp_config_modify) config_modify = from("ucp_config_modify");
  decltype(&ucp_config_release) config_release = from("ucp_config_release");
  decltype(&ucp_context_query) context_query = from("ucp_context_query");
  decltype(&ucp_context_print_info) context_print_info = from("ucp_context_print_info");
  decltype(&ucp_worker_create) worker_create = from("ucp_worker_create");
  decltype(&ucp_worker_destroy) worker_destroy = from("ucp_worker_destroy");
  decltype(&ucp_worker_query) worker_query = from("ucp_worker_query");
  decltype(&ucp_worker_release_address) worker_release_address = from("ucp_worker_release_address");
  decltype(&ucp_worker_get_efd) worker_get_efd = from("ucp_worker_get_efd");
  decltype(&ucp_worker_arm) worker_arm = from("ucp_worker_arm");
  decltype(&ucp_worker_progress) worker_progress = from("ucp_worker_progress");
  decltype(&ucp_worker_set_am_recv_handler) worker_set_am_recv_handler = from("ucp_worker_set_am_recv_handler");
  decltype(&ucp_ep_create) ep_create = from("ucp_ep_create");
  decltype(&ucp_ep_close_nbx) ep_close_nbx = from("ucp_ep_close_nbx");
  decltype(&ucp_ep_flush_nbx) ep_flush_nbx = from("ucp_ep_flush_nbx");
  decltype(&ucp_am_send_nbx) am_send_nbx = from("ucp_am_send_nbx");
  decltype(&ucp_am_recv_data_nbx) am_recv_data_nbx = from("ucp_am_recv_data_nbx");
  decltype(&ucp_request_check_status) request_check_status = from("ucp_request_check_status");
  decltype(&ucp_request_free) request_free = from("ucp_request_free");
  decltype(&ucs_status_string) status_string = from("ucs_status_string");

  /// Explains the status of a failed send or a broken endpoint.
  std::string explain(ucs_status_t status) const;
  /// Throws Error if nvx cannot use this version.
  UcxVersion version_or_throw() const;
};

/// Loads libucp at the first call and never unloads it. Throws Error that says what to install.
const UcxLibrary& ucx_library();

/// Warns once if the process contains another libucp than nvx's.
void warn_of_second_ucx(const UcxLibrary& own);

}  // namespace nvx::net
