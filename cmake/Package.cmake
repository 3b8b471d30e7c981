# cmake --install: a relocatable package. find_package(penstock) gives penstock::penstock and one target per folder.

add_library(penstock_all INTERFACE)
set_target_properties(penstock_all PROPERTIES EXPORT_NAME penstock)
target_link_libraries(penstock_all INTERFACE ${PENSTOCK_FOLDERS})

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/penstock)
install(TARGETS penstock_all ${PENSTOCK_FOLDERS} EXPORT penstock_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT penstock_targets NAMESPACE penstock:: DESTINATION ${package_folder})
install(TARGETS penstock RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/penstock DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "cli" EXCLUDE)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/penstockConfig.cmake.in ${PROJECT_BINARY_DIR}/penstockConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/penstockConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/penstockConfig.cmake ${PROJECT_BINARY_DIR}/penstockConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/TorchTarget.cmake
        DESTINATION ${package_folder})
