# cmake --install: a relocatable package. find_package(penstock) gives penstock::penstock, the one library, and its public headers.

# All rooms but the command's in one archive: users link this and nothing else.
set(objects)
foreach(room IN LISTS PENSTOCK_ROOMS)
  if(NOT room MATCHES "^penstock_cli")
    list(APPEND objects $<TARGET_OBJECTS:${room}>)
  endif()
endforeach()
add_library(penstock_library STATIC ${objects})
add_library(penstock::penstock ALIAS penstock_library)
set_target_properties(penstock_library PROPERTIES OUTPUT_NAME penstock EXPORT_NAME penstock LINKER_LANGUAGE CXX)
target_compile_features(penstock_library PUBLIC cxx_std_20)
target_include_directories(penstock_library PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                   $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(penstock_library
  PUBLIC fmt::fmt spdlog::spdlog Threads::Threads $<BUILD_INTERFACE:penstock_libtorch> $<INSTALL_INTERFACE:penstock::libtorch>
  PRIVATE ${PENSTOCK_UCP_LIBRARY} ${PENSTOCK_UCS_LIBRARY} ${CMAKE_DL_LIBS})
if(PENSTOCK_GLOO_LIBRARY)
  target_link_libraries(penstock_library PRIVATE ${PENSTOCK_GLOO_LIBRARY})
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)
install(TARGETS penstock_library EXPORT penstock_targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT penstock_targets NAMESPACE penstock:: DESTINATION ${package_folder})
install(TARGETS penstock RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS penstock-tensor RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/penstock)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/penstock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/penstockConfig.cmake.in ${PROJECT_BINARY_DIR}/penstockConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/penstockConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/penstockConfig.cmake ${PROJECT_BINARY_DIR}/penstockConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/TorchTarget.cmake
        DESTINATION ${package_folder})
