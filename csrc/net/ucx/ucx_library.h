#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "base/library.h"
#include "net/ucx/ucx_address.h"

namespace nvx::net {

#define NVX_UCX(function, name) decltype(&function) name = from(#function)

/// libucp, loaded at run time. Its version may differ from the headers: UCX's structures grow only at their ends and
/// mark their valid fields by masks, so either side may be the newer one.
struct UcxLibrary {
  Library from;

  NVX_UCX(ucp_get_version, get_version);
  UcxVersion version = version_or_throw();  // before the functions that older versions lack
  NVX_UCX(ucp_init_version, init_version);
  NVX_UCX(ucp_cleanup, cleanup);
  NVX_UCX(ucp_config_read, config_read);
  NVX_UCX(ucp_config_modify, config_modify);
  NVX_UCX(ucp_config_release, config_release);
  NVX_UCX(ucp_context_query, context_query);
  NVX_UCX(ucp_context_print_info, context_print_info);
  NVX_UCX(ucp_worker_create, worker_create);
  NVX_UCX(ucp_worker_destroy, worker_destroy);
  NVX_UCX(ucp_worker_query, worker_query);
  NVX_UCX(ucp_worker_release_address, worker_release_address);
  NVX_UCX(ucp_worker_get_efd, worker_get_efd);
  NVX_UCX(ucp_worker_arm, worker_arm);
  NVX_UCX(ucp_worker_progress, worker_progress);
  NVX_UCX(ucp_worker_set_am_recv_handler, worker_set_am_recv_handler);
  NVX_UCX(ucp_ep_create, ep_create);
  NVX_UCX(ucp_ep_close_nbx, ep_close_nbx);
  NVX_UCX(ucp_ep_flush_nbx, ep_flush_nbx);
  NVX_UCX(ucp_am_send_nbx, am_send_nbx);
  NVX_UCX(ucp_am_recv_data_nbx, am_recv_data_nbx);
  NVX_UCX(ucp_request_check_status, request_check_status);
  NVX_UCX(ucp_request_free, request_free);
  NVX_UCX(ucs_status_string, status_string);

  /// Explains the status of a failed send or a broken endpoint.
  std::string explain(ucs_status_t status) const;
  /// Throws Error if nvx cannot use this version.
  UcxVersion version_or_throw() const;
};

/// Loads libucp at the first call and never unloads it. Throws Error that names what to install.
const UcxLibrary& ucx_library();

/// Warns once if the process contains another libucp than nvx's.
void warn_of_second_ucx(const UcxLibrary& own);

}  // namespace nvx::net
